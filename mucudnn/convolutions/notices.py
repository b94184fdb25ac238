"""Why calls are left to PyTorch's own convolution while a model runs, told once each."""

import enum

from mucudnn.errors import UntunedWarning, warn_user


class Reason(enum.Enum):
    """Why a call, or a gradient, is left to PyTorch's own convolution; the value says what can be done."""

    LARGER_BATCH = "optimize with the largest batch divides smaller ones too"
    """Its shape was tuned, for smaller batches only."""
    OTHER_SHAPE = "optimize with dynamic=True tunes shapes when they are met"
    """Nothing like it was tuned."""
    OTHER_FORM = "optimize in the type and layout in which it runs, inside of torch.autocast if it runs there"
    """Its shape was tuned, in another type or layout."""
    SINGLE_VOLUME = (
        "PyTorch computes a single volume in another layout than several; optimize with dynamic=True tunes "
        "that, too"
    )
    """Its shape was tuned, of several samples and with the channels last."""
    OTHER_BIAS = "optimize it as it is now: folding batch norm gives a bias, so fold before"
    """Its shape was tuned, with a bias where it has none now, or without one."""
    TRAINED_AFTER_ALL = "optimize again as it is now, or before anything is frozen"
    """The gradient of its weight was not needed when it was tuned."""
    INPUT_AFTER_ALL = (
        "optimize it again as it is now, with a sample that requires a gradient if a later one does; "
        "mucudnn.autotune tunes whatever is met"
    )
    """The gradient of its input was not needed when it was tuned."""
    FOR_INFERENCE = (
        "optimize it in training mode; where it is trained in eval mode, as with frozen batch norm, with "
        "ops=('fprop', 'dgrad', 'wgrad')"
    )
    """It was tuned in eval mode, for forward passes alone."""
    ELSEWHERE = "go back to that environment, or optimize again in this one"
    """The plan's times are those of another environment."""
    MOVED = "move it back, or optimize again where it is now"
    """Its tensors lie on another kind of device."""
    PARTS = "a larger limit may let it be divided, and after policy='undivided' another policy"
    """Its batch cannot be made of sizes that were measured, or its parts do not run or need too much."""
    WATCHED = "elsewhere it is divided"
    """Whoever watches what is computed, as a mode does, would not see a convolution."""
    FORKED = "make a context there"
    """It is another process than that whose context was entered."""
    OF_A_CLASS = "convolutions of tensors that hold numbers themselves are divided"
    """Its tensors are of a class of their own, which computes in its own way."""


class Notice:
    """The reasons that were given so far, each once; the modules of a model and its deep copies share one.

    So do copies of single modules, of which another model may be made: batch norm is folded into such.

    Args:
        scope: for what each is given once.
    """

    def __init__(self, scope: str = "for the whole model") -> None:
        self._scope = scope
        self._given: set[Reason] = set()

    def __deepcopy__(self, memo: object) -> "Notice":
        """Have copies share it."""
        return self

    def give(self, reason: Reason, what: str, runs: str = "it runs PyTorch's own convolution") -> None:
        """Warn that `what`, with its verb, runs as before, unless the reason was given already.

        Args:
            reason: which is given once.
            what: subject and verb.
            runs: what computes it.
        """
        if reason in self._given:
            return
        self._given.add(reason)
        warn_user(
            f"{what}; {runs} ({reason.value}). This reason is given once {self._scope}.",
            UntunedWarning,
        )
