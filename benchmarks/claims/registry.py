"""All claims, in the order of the table."""

from benchmarks.claims import costs, gradients, ladder, learning, meaning, precision, variance
from benchmarks.claims.claim import Claim

CLAIMS: dict[str, Claim] = {
    claim.id: claim
    for part in (gradients, variance, learning, meaning, costs, ladder, precision)
    for claim in part.CLAIMS
}
