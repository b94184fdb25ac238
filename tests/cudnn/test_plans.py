"""How a plan learns of its device: by a description, or by the handle of one that is there."""

from mucudnn.backends.cudnn.constants import Attribute
from mucudnn.backends.cudnn.devices import device_described
from mucudnn.backends.cudnn.engines import Enumerator
from tests.cudnn.doubles import library_double
from tests.cudnn.problems import conv

HANDLE = 4096
BY_HANDLE = {Attribute.GRAPH_HANDLE, Attribute.PLAN_HANDLE}
BY_DESCRIPTION = {Attribute.DEVICE_JSON, Attribute.ENGINE_DEVICE, Attribute.PLAN_DEVICE}


class _Heard:
    """The attributes that a library was told."""

    def __init__(self) -> None:
        self.attributes: list[int] = []
        self.library = library_double(set_attribute=self._set_attribute)

    def _set_attribute(self, descriptor: int, attribute: int, *arguments: int) -> int:
        self.attributes.append(attribute)
        return 0


def test_a_plan_for_a_described_device_has_the_description_and_no_handle() -> None:
    heard = _Heard()

    Enumerator(heard.library, device_described("h200")).plan(conv(), 65, ((2, 5),), accumulate=False)

    assert set(heard.attributes) >= BY_DESCRIPTION
    assert not set(heard.attributes) & BY_HANDLE


def test_a_plan_for_a_device_that_is_there_has_its_handle_and_no_description() -> None:
    heard = _Heard()

    Enumerator(heard.library, lambda: HANDLE).plan(conv(), 65, ((2, 5),), accumulate=False)

    assert set(heard.attributes) >= BY_HANDLE
    assert not set(heard.attributes) & BY_DESCRIPTION


def test_the_handle_is_asked_for_anew_for_every_plan() -> None:
    asked: list[int] = []
    enumerator = Enumerator(_Heard().library, lambda: asked.append(HANDLE) or HANDLE)

    enumerator.plan(conv(), 65, (), accumulate=False)
    enumerator.plan(conv(), 65, (), accumulate=False)

    assert asked == [HANDLE, HANDLE]
