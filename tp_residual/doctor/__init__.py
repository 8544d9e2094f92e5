"""What is wrong with a residual connection, by name.

    from tp_residual.doctor import diagnose
    diagnosis = diagnose(model, [[1, 2, 3, ...]])     on every rank alike
    diagnosis.faults                                   [] for a healthy model

One forward and one backward pass are observed at every boundary. `expect` says in fp64, in one process, what each step should have made of
what the model itself had before it, so that the first wrong step is found and nothing after it is blamed. A wrong step is then compared
with what each known mistake would have made: an update skipped, doubled, not summed over ranks, a skip added on every rank.
"""

from typing import TYPE_CHECKING, Any

from tp_residual.doctor.report import Diagnosis, Finding

if TYPE_CHECKING:
    from tp_residual.doctor.run import diagnose

__all__ = ["Diagnosis", "Finding", "diagnose"]


def __getattr__(name: str) -> Any:
    """`diagnose` needs torch; the report, which the command line imports first, does not."""
    if name == "diagnose":
        from tp_residual.doctor.run import diagnose

        return diagnose
    raise AttributeError(name)
