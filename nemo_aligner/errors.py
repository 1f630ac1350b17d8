"""The errors a user can meet; each message says where, what was got and what was wanted."""


class AlignerError(Exception):
    """Base of every error raised on purpose by this package."""


class ConfigError(AlignerError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class DataError(AlignerError, ValueError):
    """A record or text that cannot be read or scored; the message names file and line."""


class CheckpointError(AlignerError, RuntimeError):
    """A checkpoint that is missing, incomplete, unsafe or made for another model."""


class ServingError(AlignerError, RuntimeError):
    """A request that cannot be answered, or a server that cannot go on."""


class TrainingError(AlignerError, RuntimeError):
    """A step whose numbers are no longer finite; the message names step, rank and records."""
