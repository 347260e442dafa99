"""A key is declared once: one new field is read, validated, described, in the reference and in the JSON Schema."""

from dataclasses import dataclass

import pytest

from msprobe_megatron.config import ConfigError, ProbeConfig, RecorderConfig, describe, from_document
from msprobe_megatron.config.document import Context, Node
from msprobe_megatron.config.keys import (
    Contradiction,
    integer,
    key,
    keys_of,
    read_section,
    refuse_contradictions,
    required_key,
    section,
    section_schema,
)
from msprobe_megatron.config.reference import reference


@dataclass(frozen=True)
class Recorder(RecorderConfig):
    """The ``recorder`` section, with one key more."""

    flush_seconds: int = key(30, integer(1, 600), "time limit of writing the recorder, in seconds", "60")


@dataclass(frozen=True)
class ProbeFile(ProbeConfig):
    """A probe file whose recorder has one key more."""

    recorder: Recorder | None = key(None, section(Recorder), "the flight recorder", "{flush_seconds: 60}")


def read(**settings):
    return read_section(ProbeFile, Node({"recorder": settings}, "", Context("probe.yaml")), source="probe.yaml")


def test_a_new_key_is_read_with_its_default():
    assert read(flush_seconds=60).recorder == Recorder(flush_seconds=60)
    assert read().recorder.flush_seconds == 30


def test_a_new_key_is_validated():
    with pytest.raises(ConfigError, match="recorder.flush_seconds: 601 is out of range; accepted: .* to 600$"):
        read(flush_seconds=601)
    with pytest.raises(ConfigError, match="flush_second: unknown key .did you mean flush_seconds"):
        read(flush_second=60)


def test_a_new_key_is_described():
    assert "last 4 steps, written on nonfinite, alert, signal, flush_seconds: 60" in describe(read(flush_seconds=60))
    assert "flush_seconds" not in describe(read())


def test_a_new_key_is_in_the_reference():
    line = (
        "| `flush_seconds` | `30` | a whole number from 1 to 600 | time limit of writing the recorder, in seconds |"
        " `flush_seconds: 60` |"
    )
    assert line in reference(ProbeFile).splitlines()
    assert line not in reference().splitlines()


def test_a_new_key_is_in_the_schema():
    schema = section_schema(ProbeFile)["properties"]["recorder"]["properties"]["flush_seconds"]
    assert schema == {
        "type": "integer",
        "minimum": 1,
        "maximum": 600,
        "description": "time limit of writing the recorder, in seconds",
        "default": 30,
    }


def test_the_shipped_file_does_not_know_the_key():
    with pytest.raises(ConfigError, match="flush_seconds: unknown key"):
        from_document({"recorder": {"flush_seconds": 60}}, "probe.yaml")


def test_required_keys():
    @dataclass(frozen=True)
    class Rule:
        name: str = required_key(integer(0), "which one", "1")
        size: int = key(2, integer(0), "how large", "3")

    assert [declared.required for declared in keys_of(Rule).values()] == [True, False]
    assert section_schema(Rule)["required"] == ["name"]
    with pytest.raises(ConfigError, match="rule: {'size': 1} has no name; accepted: {name: number}"):
        read_section(Rule, Node({"size": 1}, "rule", Context("probe.yaml")), "{name: number}")


def test_contradictions_show_the_value_and_the_other_setting():
    @dataclass(frozen=True)
    class Pair:
        low: int = key(0, integer(0), "lower end", "1")
        high: int = key(9, integer(0), "upper end", "2")

    rules = [Contradiction("low", lambda pair: pair.low > pair.high, "is above high, which is {high}", "at most high")]
    node = Node({}, "pair", Context("probe.yaml"))
    refuse_contradictions(Pair(3, 4), rules, node)
    with pytest.raises(ConfigError, match="pair.low: 5 is above high, which is 4; accepted: at most high$"):
        refuse_contradictions(Pair(5, 4), rules, node)
