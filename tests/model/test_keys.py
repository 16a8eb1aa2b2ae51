"""Keys of a table: who writes one and who reads it agree."""

from trtpipe.model.keys import input_key, is_read_by, operand_key, weight_key


def test_a_modules_operations_with_a_weight_read_any_of_its_inputs() -> None:
    assert [input_key("a.b", k) for k in (0, 1)] == ["a.b:input", "a.b:input_1"]
    assert weight_key("a.b", 2) == "a.b:weight_2"
    assert all(is_read_by(input_key("a.b", k), "a.b", "linear") for k in (0, 1))
    assert not is_read_by(weight_key("a.b", 0), "a.b", "linear")
    assert not is_read_by(input_key("a.b", 0), "a", "linear")


def test_others_read_what_their_name_begins_and_no_longer_name() -> None:
    assert operand_key("m", "matmul", 0, 1) == "m:matmul.input_1"
    assert operand_key("m", "max_pool2d", 3) == "m:max_pool2d_3.input"
    assert all(is_read_by(operand_key("m", "matmul", k, 0), "m", "matmul") for k in (0, 7))
    assert not is_read_by(operand_key("m", "matmul", 0, 0), "m", "mat")
