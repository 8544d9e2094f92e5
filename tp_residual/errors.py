"""Every error a user can cause, by name.

All of them are raised before the first collective, from values that every rank shares, so that ranks fail together. The command line
prints their message and exits with a non-zero code; anything else that escapes is a defect of ours and keeps its traceback.
"""


class UserError(ValueError):
    """Something the caller can put right: the message says value, relation, value, and the way out."""


class ConfigError(UserError):
    """A model's config.json that is broken, or asks for what is not supported."""


class CheckpointError(UserError):
    """Weights that are missing, unexpected, of the wrong shape, or unreadable."""


class SplitError(UserError):
    """An axis that cannot be divided over the group."""


class LayoutError(UserError):
    """A value used as if it had another layout: a partial sum taken for a tensor, a shard for the whole, a stale stream."""


class RequestError(UserError):
    """A generation request that cannot be served: empty prompt, too many tokens, an id outside the vocabulary."""


class CollectiveError(RuntimeError):
    """A collective that failed or ran out of time; names rank, sequence number, tag, shape and dtype."""


class GenerationError(RuntimeError):
    """Generation that cannot go on: NaN logits, or ranks that no longer agree. Raised on every rank."""


class TrainingError(RuntimeError):
    """Training that cannot go on: a gradient that is not finite. Names step, parameter and rank; raised on every rank."""


class VerificationFailed(RuntimeError):
    """A comparison that found something wrong: all of it has been printed, this is the verdict."""
