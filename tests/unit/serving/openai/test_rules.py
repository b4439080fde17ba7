import pytest

from outrider.actors.replica_calls import RequestError
from outrider.actors.serving.openai.fields import Label, Refused, Works, held_against

RULES = {
    "text": Works(),
    "options": Works(shape="object", inner={"depth": Works(), "colour": Refused("grey only", ("grey",))}),
    "items": Works(shape="objects", inner={"name": Works(), "label": Label("nothing")}),
    "loose": Works(inner={"name": Works()}),
    "user": Label("a name"),
    "beams": Refused("no beams", (False, 1.0)),
}


def refusal(body):
    with pytest.raises(RequestError) as caught:
        held_against(RULES, body)
    return caught.value


def test_keeps_what_works():
    body = {"text": "a", "options": {"depth": [1]}, "items": [{"name": "n"}], "loose": "auto"}
    assert held_against(RULES, body) == body


def test_drops_labels_and_refused_fields_that_ask_for_nothing():
    body = {"text": "a", "user": "me", "beams": False, "items": [{"label": 1}], "options": {"colour": "grey"}}
    assert held_against(RULES, body) == {"text": "a", "items": [{}], "options": {}}


@pytest.mark.parametrize("value", [None, False, 1, 1.0])
def test_neutral(value):
    assert held_against(RULES, {"beams": value}) == {}


@pytest.mark.parametrize("value", [True, 0, 2, "", []])
def test_refused(value):
    """0 is not false, true is not 1."""
    error = refusal({"beams": value})
    assert error.field == "beams"
    assert "no beams" in str(error)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"txt": 1}, "txt"),
        ({"options": {"dept": 1}}, "options.dept"),
        ({"items": [{}, {"nam": 1}]}, "items.1.nam"),
        ({"loose": {"x": 1}}, "loose.x"),
        ({"loose": [{"x": 1}]}, "loose.0.x"),
        ({"options": {"colour": "red"}}, "options.colour"),
        ({"options": 1}, "options"),
        ({"items": {}}, "items"),
        ({"items": ["a"]}, "items.0"),
    ],
)
def test_names_the_field(body, field):
    assert refusal(body).field == field


def test_suggests_the_nearest_name():
    assert "did you mean 'text'?" in str(refusal({"txt": 1}))
    assert "leave it out" in str(refusal({"zzzzzz": 1}))


def test_long_names_are_cut():
    assert len(str(refusal({"x" * 10_000: 1}))) < 400


@pytest.mark.parametrize("name", ["text", "options", "items", "loose"])
def test_null_is_left_to_vllm(name):
    assert held_against(RULES, {name: None}) == {name: None}
