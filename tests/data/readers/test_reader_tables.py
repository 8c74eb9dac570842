"""Tables and JSON lines: quoting, line breaks, and errors with line numbers."""

from __future__ import annotations

import csv
import gzip
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consilience.core.settings import Invalid
from consilience.data.readers.tables import read_json_lines, read_table


def test_csv_fields_may_hold_commas_quotes_and_line_breaks(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbftext,label\r\n"one, ""two""\nthree",x\r\n\r\nplain,y\r\n')
    table = read_table(path)
    assert table.columns == {"text": ['one, "two"\nthree', "plain"], "label": ["x", "y"]}


def test_tsv_quotes_are_plain_characters(tmp_path):
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(gzip.compress(b'text\tlabel\n"open\tx\n6" nail\ty\n'))
    assert read_table(path).column("text") == ['"open', '6" nail']


@pytest.mark.parametrize(
    ("content", "defect"),
    [
        ("", "is empty"),
        ("a,b\n", "no rows"),
        ("a,a\n1,2\n", "names column a twice"),
        ("a,b\n1,2\n1\n", "line 3: 1 fields where the header has 2"),
        ("a,b\n1,2,3\n", "line 2: 3 fields"),
        ('a,b\n1,"2\n', "line 2: unexpected end of data"),
    ],
)
def test_wrong_tables_are_refused_with_the_line(tmp_path, content, defect):
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(Invalid, match=defect) as problem:
        read_table(path)
    assert str(path) in str(problem.value)


def test_absent_column_points_at_the_nearest(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("hospital,num\na,1\n")
    with pytest.raises(Invalid, match=r"no column 'hospitl' \(did you mean 'hospital'\?\); it has hospital, num"):
        read_table(path).column("hospitl")


def test_bare_table_takes_the_names_given(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('"0","hello"\n')
    assert read_table(path, header=("label", "text")).columns == {"label": ["0"], "text": ["hello"]}


cells = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


@given(rows=st.lists(st.tuples(cells, cells.filter(bool)), min_size=1, max_size=5))
def test_whatever_the_csv_module_writes_comes_back(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("table") / "a.csv"
    text = io.StringIO(newline="")
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *rows])
    path.write_bytes(text.getvalue().encode())
    assert list(zip(*read_table(path).columns.values())) == rows


def test_json_lines_name_the_broken_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"play": "x", "text": "y"}\n\n{"play": "x"}\n')
    with pytest.raises(Invalid, match="line 3 has no text"):
        read_json_lines(path, ("play", "text"))
    path.write_text('{"play": "x"}\n{"play": \n')
    with pytest.raises(Invalid, match="line 2 is not readable JSON"):
        read_json_lines(path, ("play",))
