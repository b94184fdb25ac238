"""What a call takes of a buffer whose end others take, and the name it has then."""

from mucudnn.division import Division, undivided
from mucudnn.problem import ConvOp
from mucudnn.profile import Candidate
from mucudnn.profiling.measurer import ModelCall
from tests.examples import a_problem


def test_a_call_whose_buffer_others_shorten_has_a_name_of_its_own() -> None:
    divisions = {ConvOp.FPROP: Division((Candidate("x", 32, 1.0, 6000),))}
    alone = ModelCall(a_problem(op=ConvOp.FPROP), is_sharing=False, limit_bytes=10_000)
    after = alone._replace(taken_bytes=5000)

    assert (alone.lost_bytes(divisions), after.lost_bytes(divisions)) == (0, 1000)
    assert {*after.key(divisions).split()} == {*alone.key(divisions).split(), "lost=1000"}
    assert after._replace(taken_bytes=20_000).lost_bytes(divisions) == 6000


def test_what_takes_no_end_of_a_common_buffer_loses_nothing_to_others() -> None:
    divisions = {ConvOp.FPROP: Division((Candidate("x", 32, 1.0, 6000),))}
    own = {ConvOp.FPROP: undivided("cpu:aten", 32)}
    after = ModelCall(a_problem(op=ConvOp.FPROP), is_sharing=False, limit_bytes=10_000, taken_bytes=5000)

    assert after.lost_bytes(own) == 0
    assert after._replace(taken_bytes=4000).lost_bytes(divisions) == 0
    assert after._replace(is_sharing=True).lost_bytes(divisions) == 0
