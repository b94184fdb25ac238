"""Tuning single convolutions when they are first met."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from mucudnn.backends import backend_for
from mucudnn.convolutions.surroundings import autocast_dtype, without_autocast
from mucudnn.errors import UntunedWarning, warn_user
from mucudnn.examining.extraction import Extraction, SiteCall
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.patching.routing import NotNowError
from mucudnn.plan import Plan
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profiling.profiler import Forgotten
from mucudnn.progress import progress_for
from mucudnn.store import Store, in_memory, opened
from mucudnn.tuning.options import Settings
from mucudnn.tuning.run import Tuning


class Learner:
    """Tunes convolutions one by one, in reuse mode; of threads whoever calls it lets one in at a time.

    The store's file is open only meanwhile. Once it cannot be used, the store in memory that takes its place
    stays, lest equal problems be measured again. Copies and pickles know the same settings, try the file
    anew, warn anew, and measure anew if that was asked for.
    """

    def __init__(self, settings: Settings) -> None:
        """Remember how to tune."""
        self._settings = settings
        self._store = settings.store
        self._told: frozenset[type[Exception]] = frozenset()
        self._forgotten: set[Forgotten] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Keep all but what is in the place of a file, what was told, and what was measured anew."""
        return {**self.__dict__, "_store": self._settings.store, "_told": frozenset(), "_forgotten": set()}

    def __call__(
        self, device: torch.device, name: str, number: int, problem: ConvProblem, ops: tuple[ConvOp, ...]
    ) -> Plan:
        """Return the plan for some ops of a convolution on a device.

        Args:
            device: where its tensors lie.
            name: of the site.
            number: which shape of that site it is.
            problem: of the forward pass.
            ops: by the problem's names.

        Raises:
            InfeasibleError: nothing fits the limit.
            NotNowError: the call is being captured in a CUDA graph, where nothing may be measured.
        """
        settings = self._settings
        backend = backend_for(settings.backend, device)
        if backend.is_capturing:
            self._tell_captured(problem)
            raise NotNowError
        extraction = Extraction((SiteCall(name, number, problem, ops, ops),), ())
        # Whoever meets a convolution under autocast wants measurements of its own type.
        plain = without_autocast(autocast_dtype(device))
        with plain, self._opened() as store, progress_for(settings.progress) as shown:
            measurer = LiveMeasurer(backend)
            profiler = settings.profiler(measurer, store)
            tuning = Tuning(profiler, settings.mode, extraction, shown, warn=self._warn)
            if settings.again:
                tuning.forget(self._forgotten)  # once: layers may be equal
            return tuning.plan()

    def _tell_captured(self, problem: ConvProblem) -> None:
        """Warn once: unlike elsewhere there is no next call, as replays ask nobody."""
        if NotNowError not in self._told:
            self._told |= {NotNowError}
            warn_user(
                f"{problem} is met while a CUDA graph is captured, in which nothing can be tuned: all "
                "replays will run PyTorch's own convolution. Run the model once on these shapes before you "
                "capture. This is told once for all shapes that are tuned when first met.",
                UntunedWarning,
            )

    def _warn(self, message: str, category: type[Warning]) -> None:
        """Warn of each kind of thing once, for the first convolution that is met."""
        if category not in self._told:
            self._told |= {category}
            warn_user(f"{message} This is told once for all shapes that are tuned when first met.", category)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Store]:
        """Yield the store, and remember what has taken its place."""
        with opened(self._store) as store:
            try:
                yield store
            finally:
                self._store = in_memory(store) or self._store
