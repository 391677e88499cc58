"""Every error Talon raises on purpose. Each message is one line that names the field and the fix."""


class TalonError(Exception):
    """Base of all errors a caller of Talon can expect."""


class ConfigError(TalonError, ValueError):
    """A configuration key or value is wrong."""


class RequestError(TalonError, ValueError):
    """A prompt or sampling parameter is wrong; the engine was not touched."""


class OverContext(RequestError):
    """Prompt and answer together are longer than a request may be."""


class ModelError(TalonError):
    """A model directory is missing, incomplete, or of a family that cannot verify a tree."""


class DrafterMismatch(ModelError):
    """The drafter was made for another target."""


class RequestFailed(TalonError):
    """The verifier could not continue this request (out of memory, say); others are not affected."""


class NotANumber(RequestFailed):
    """The target's logits hold NaN, and no token can be chosen."""


class QueueFull(TalonError):
    """The engine refuses more work (`queue.full: refuse`)."""


class EngineClosed(TalonError):
    """The engine was closed while, or before, the request ran."""


class WorkerDied(TalonError):
    """A worker died and cannot be started again; the message says why."""


class ProtocolError(TalonError):
    """A message does not follow `engine.messages`; it is dropped and counted."""


class OutOfBlocks(TalonError):
    """The pool of keys and values has too few free blocks; the request waits, or another is preempted."""


def first_line(error: BaseException) -> str:
    """The first line of the error's message; its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
