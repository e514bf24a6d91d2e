"""An error says what is wrong, all of it, and what would be right."""

from __future__ import annotations

import pickle

from exatwin.topology.errors import InputError, Problem, input_error, nearest, nearest_numbers


def test_one_problem_is_one_line():
    error = input_error("has no such key", where="mine.yaml", field="layout.tp")
    assert str(error) == "mine.yaml: layout.tp: has no such key"


def test_several_problems_stand_below_each_other():
    error = InputError("mine.yaml", [Problem("a", "is wrong"), Problem("", "is empty")])
    assert str(error).splitlines() == ["mine.yaml: 2 problems", "  - a: is wrong", "  - is empty"]


def test_an_error_survives_pickling():
    error = InputError("mine.yaml", [Problem("a", "is wrong")])
    again = pickle.loads(pickle.dumps(error))
    assert (again.where, again.problems, str(again)) == (error.where, error.problems, str(error))


def test_an_error_is_a_value_error():
    assert isinstance(input_error("no"), ValueError)


def test_a_misspelt_word_suggests_the_nearest_whatever_its_case():
    assert nearest("fronteir", ["frontier", "fugaku"]) == "; did you mean frontier?"
    assert nearest("FRONTIER", ["frontier", "fugaku"]) == "; did you mean frontier?"


def test_a_strange_word_lists_what_is_known():
    assert nearest("xyz", ["frontier", "fugaku"]) == "; known: frontier, fugaku"
    assert nearest("xyz", []) == ""


def test_of_very_many_words_only_the_closest_are_named():
    told = nearest("nosuch", [f"run-{i}" for i in range(1900)])
    assert told.startswith("; closest of 1,900 known: run-")
    assert len(told) < 200


def test_the_nearest_numbers_come_in_order():
    assert nearest_numbers(6, range(1, 65), most=4) == "4, 5, 6, 7"
    assert nearest_numbers(6, []) == ""
