"""Which card, driver and libraries these are, and where cuDNN's description differs from the shipped one."""

import dataclasses
import json
from collections.abc import Iterator, Sequence

from bench.gpu.results import slug
from bench.gpu.sections import Task, attempted, only
from bench.gpu.values import Answer
from mucudnn.backends.cudnn.devices import DEVICES, DeviceDescription, device_described


@dataclasses.dataclass(frozen=True)
class Fact:
    """What was measured on."""

    name: str
    value: str


@dataclasses.dataclass(frozen=True)
class Described:
    """The description that cuDNN makes of the card."""

    json: str
    failure: str | None


@dataclasses.dataclass(frozen=True)
class Difference:
    """Keys of that description whose values differ from the shipped one's."""

    key: str
    live: str
    shipped: str


@dataclasses.dataclass(frozen=True)
class Compared:
    """Which description of those that are shipped it was compared with."""

    shipped: str
    keys: int
    differing: int


def shipped_for(name: str) -> DeviceDescription | None:
    """Return the shipped description of a card of that name; None if there is none.

    Whole words count: a GH200 is no H200, and an RTX A1000 no A100.
    """
    found = next((device for device in DEVICES if device in slug(name).split("-")), None)
    return None if found is None else device_described(found)


def differences(live: DeviceDescription, shipped: DeviceDescription) -> tuple[Difference, ...]:
    """Return the keys whose values differ, a missing one included, in alphabetical order."""
    ours, theirs = json.loads(shipped.text), json.loads(live.text)
    return tuple(
        Difference(key, json.dumps(theirs.get(key)), json.dumps(ours.get(key)))
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    )


def rows(task: Task) -> Iterator[object]:
    """Yield facts of the environment, the card's description, and its differences."""
    ground = task.ground
    environment = ground.backend.environment()
    known = {**environment.device, **environment.software, **environment.soft}
    facts = {**known, "name": ground.name, "cuDNN path": ground.library.path}
    for name, value in {**facts, **environment.policy, **ground.conditions()}.items():
        yield Fact(name, value)
    text, failure = attempted(ground, ground.told)
    live, misread = attempted(ground, ground.description)
    yield Described(text or "", failure or misread)
    shipped = shipped_for(ground.name)
    if live is None or shipped is None:
        return
    found = differences(live, shipped)
    yield from found
    yield Compared(shipped.name, len(json.loads(shipped.text)), len(found))


def answers(rows: Sequence[object]) -> Iterator[Answer]:
    """Yield what the card is, and whether its description is the shipped one."""
    facts = {fact.name: fact.value for fact in only(Fact, rows)}
    known = ", ".join(
        f"{name} {facts[name]}" for name in ("driver", "CUDA", "torch", "cuDNN") if name in facts
    )
    yield Answer("Which card is it?", f"{facts.get('name', 'unknown')}; {known}")
    question = "Is the card described as the shipped description says?"
    for described in only(Described, rows):
        if described.failure is not None:
            yield Answer(question, f"no description: {described.failure}")
    for compared in only(Compared, rows):
        keys = ", ".join(each.key for each in only(Difference, rows))
        text = f"{compared.differing} of {compared.keys} keys differ from {compared.shipped}"
        yield Answer(question, f"{text}: {keys}" if keys else text)
