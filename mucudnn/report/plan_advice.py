"""What the notes on a plan advise beside its limit: another layout, CUDA graphs, idle threads that sleep."""

from mucudnn.plan import Assignment, Plan
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.profile import Environment, is_own

_LAYOUT = (
    "Images are contiguous at {} of {} sites. On processors, most patched training steps measured so far "
    "took less time in channels_last (README): model.to(memory_format=torch.channels_last), then tune."
)
_CARD_LAYOUT = (
    "Images are contiguous at {} of {} sites of 16 bits or TF32. There cuDNN copies them to channels_last "
    "and back, in workspace. In channels_last most layers measured so far took less time and little "
    "workspace (README): model.to(memory_format=torch.channels_last), then tune."
)
_HOST = (
    "{} of {} sites run parts of less than 0.1 ms by other engines than PyTorch's own. On an H200 the host "
    "took some 30 µs more for such an op, and as much again for each further part, so a step that waits for "
    "the host may take longer than these times tell; in a CUDA graph it does not."
)
_SHORT_PART_S = 1e-4

_UNCOMPILED = (
    "There was none when this was tuned, so the algorithms in C, mostly the fastest, were not tried. Install "
    "gcc or clang, or set the environment variable CC to one, and tune again."
)

_WAITING_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Whoever has set one of them has decided how idle threads wait."""

_WAITING = (
    "After an operation OpenMP's idle threads spin for a while, on cores that worker threads need. Setting "
    "GOMP_SPINCOUNT in the environment shortens that; mucudnn info measures what it costs here."
)


def layout_notes(plan: Plan) -> list[tuple[str, str]]:
    """Advise another layout where that was found faster for 2-D images.

    That is in training on processors, and in 16 bits and TF32 on a card.
    """
    problems = [assigned.problem for assigned in plan.assignments]
    environment = plan.environment
    is_cpu, is_card = environment.backend == "cpu", environment.backend == "cudnn"
    is_trained = any(problem.op is ConvOp.WGRAD for problem in problems)
    concerned = [
        problem
        for problem in problems
        if (is_cpu and is_trained) or (is_card and _is_of_few_bits(problem, environment))
    ]
    contiguous = sum(problem.layout is Layout.CONTIGUOUS for problem in concerned)
    is_plane = all(len(problem.input_size) == 2 for problem in problems)
    text = _LAYOUT if is_cpu else _CARD_LAYOUT
    return [("layout", text.format(contiguous, len(concerned)))] if contiguous and is_plane else []


def host_notes(plan: Plan) -> list[tuple[str, str]]:
    """Warn where parts are so short on a card that launching them may decide.

    By calls with their gradients: 120 µs of the host by PyTorch's own, 222 undivided, 504 in four parts.
    """
    if plan.environment.backend != "cudnn":
        return []
    short = sum(_part_s(each) < _SHORT_PART_S for each in plan.assignments if not _is_all_own(each))
    return [("host", _HOST.format(short, len(plan.assignments)))] if short else []


def compiler_notes(environment: Environment) -> list[tuple[str, str]]:
    """Advise a C compiler on processors, where there was none."""
    lacks = environment.backend == "cpu" and environment.software.get("C compiler") == "none"
    return [("C compiler", _UNCOMPILED)] if lacks else []


def _part_s(assigned: Assignment) -> float:
    """Return the seconds of a part, as seen or else as its profile says."""
    chosen = assigned.seen.chosen
    seconds = assigned.division.time_s if chosen is None else chosen.median
    return seconds / len(assigned.division.parts)


def _is_all_own(assigned: Assignment) -> bool:
    return all(is_own(part.algorithm) for part in assigned.division.parts)


def _is_of_few_bits(problem: ConvProblem, environment: Environment) -> bool:
    """Return whether a card multiplies in 16 bits or TF32."""
    is_tf32 = problem.dtype == "float32" and environment.policy.get("TF32") == "True"
    return is_tf32 or problem.dtype in ("float16", "bfloat16")


def waiting_notes(environment: Environment) -> list[tuple[str, str]]:
    """Say how to have idle threads sleep sooner, where they take the cores of workers.

    A team's do not: they are its workers.
    """
    is_pool = environment.policy.get("workers", "pool") == "pool"
    return [("idle threads", _WAITING)] if is_pool and waits_by_default(environment) else []


def waits_by_default(environment: Environment) -> bool:
    """Return whether idle threads of the processor wait as OpenMP sees fit: nobody has said how."""
    policy = environment.policy
    has_idle_threads = environment.backend == "cpu" and policy.get("threads", "1") != "1"
    return has_idle_threads and not any(name in policy for name in _WAITING_VARIABLES)
