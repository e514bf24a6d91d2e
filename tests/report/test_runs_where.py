"""The page says what the trainer runs, as its rules have it."""

from exatwin.report.runs_where import PAGE, with_table


def test_the_page_holds_the_rules():
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, "python -m exatwin.report.runs_where writes it"
