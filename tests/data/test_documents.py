"""Files to documents, against the bytes that were written."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from dew.data import open_documents

TEXTS = ["one\ntwo", "dri\u00e9 \U0001f600", "", "four\u2028five"]


def write_lines(path: Path, records: list[Any]) -> Path:
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    content = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_parquet(path: Path, columns: dict[str, list[Any]]) -> Path:
    parquet.write_table(arrow.table(columns), path, row_group_size=2)
    return path


def test_every_line_of_jsonl_is_a_document(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    assert list(open_documents(path)) == TEXTS


def test_blank_lines_carriage_returns_and_a_byte_order_mark_are_no_text(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}')
    assert list(open_documents(path)) == ["a", "b"]


def test_a_gzipped_file_reads_like_a_plain_one(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl.gz", [{"text": text} for text in TEXTS])
    assert list(open_documents(path)) == TEXTS


def test_every_row_of_parquet_is_a_document(tmp_path: Path):
    path = write_parquet(tmp_path / "a.parquet", {"body": TEXTS, "n": [1, 2, 3, 4]})
    assert list(open_documents(path, text_field="body")) == TEXTS


def test_a_text_file_is_one_document(tmp_path: Path):
    path = tmp_path / "a.TXT"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert list(open_documents(path)) == ["one\r\ntwo\n"]


def test_documents_are_read_at_random_across_files(tmp_path: Path):
    first = write_lines(tmp_path / "a.jsonl", [{"text": t} for t in "abc"])
    second = write_lines(tmp_path / "b.jsonl", [{"text": t} for t in "de"])
    documents = open_documents(second, first)
    assert [documents[i] for i in (4, 0, 2, -1, -5)] == ["c", "d", "a", "c", "d"]
    assert documents[1:3] == ["e", "a"]


def test_an_index_past_the_end_is_an_error(tmp_path: Path):
    documents = open_documents(write_lines(tmp_path / "a.jsonl", [{"text": "a"}]))
    with pytest.raises(IndexError, match="document 1 of 1"):
        documents[1]


def test_a_folder_is_read_by_name_with_all_below_it(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    write_lines(tmp_path / "sub" / "b.jsonl", [{"text": "b"}])
    write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "_done").write_text("x")
    (tmp_path / ".hidden.txt").write_text("x")
    (tmp_path / "README.md").write_text("x")
    documents = open_documents(tmp_path)
    assert list(documents) == ["a", "b"]
    assert documents.skipped == (str(tmp_path / "README.md"),)


def test_linked_files_are_read(tmp_path: Path):
    target = write_lines(tmp_path / "blob", [{"text": "a"}])
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").symlink_to(target)
    assert list(open_documents(tmp_path / "data")) == ["a"]


@pytest.fixture
def memory_folder():
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/corpus/a.txt", b"from afar")
    filesystem.pipe("/corpus/b.jsonl.gz", gzip.compress(b'{"text": "zipped"}'))
    yield "memory://corpus"
    filesystem.rm("/corpus", recursive=True)


def test_an_fsspec_address_is_read_like_a_local_one(memory_folder: str):
    documents = open_documents(memory_folder)
    assert list(documents) == ["from afar", "zipped"]
    assert documents.files[0] == "memory:///corpus/a.txt"


def test_the_copies_go_when_the_documents_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = write_lines(tmp_path / "a.jsonl.gz", [{"text": "a"}])
    documents = open_documents(source)
    assert len(list(tmp_path.iterdir())) == 2
    del documents
    assert list(tmp_path.iterdir()) == [source]


def test_a_file_that_changed_after_opening_is_named(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    documents = open_documents(path)
    path.write_text("changed altogether")
    with pytest.raises(ValueError, match=r"a\.jsonl changed since .* document 0"):
        documents[0]


LINE_FAULTS = {
    b'{"text": ': r"a\.jsonl:2 is not JSON: Expecting value at column",
    b'["a"]': r"a\.jsonl:2 is a JSON list, and must be an object",
    b'{"txt": "a"}': r"a\.jsonl:2 is without a field 'text'; did you mean 'txt'\?",
    b'{"q": 1}': r"a\.jsonl:2 is without a field 'text'; it has 'q'",
    b'{"text": null}': r"a\.jsonl:2 is without text: .* got NoneType",
    b'{"text": "\xff"}': r"a\.jsonl:2 is not UTF-8 \(byte 0xff at offset 10\)",
    b'{"text": "\\ud800"}': r"a\.jsonl:2 is not text: .* half a surrogate pair",
}


@pytest.mark.parametrize(("line", "message"), LINE_FAULTS.items())
def test_a_bad_line_is_named_by_file_and_line(
    tmp_path: Path, line: bytes, message: str
):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        open_documents(path)


FILE_FAULTS = {
    "a.txt": (b" \n", r"a\.txt is empty"),
    "b.txt": (b"\xff\xfea\0", r"b\.txt is not UTF-8 \(byte 0xff at offset 0\)"),
    "a.jsonl": (b"", r"a\.jsonl is empty"),
    "b.jsonl": (b'{"text": ""}\n', r"no document has any text in it: .*b\.jsonl"),
    "a.csv": (b"a,b", r"a\.csv is of no known kind; known: \.txt, \.jsonl, \.parquet"),
    "a.parquet": (b"PAR0", r"a\.parquet is not a parquet file"),
    "a.jsonl.gz": (b"{}", r"a\.jsonl\.gz cannot be read: Not a gzipped file"),
    "b.jsonl.gz": (gzip.compress(b"{}" * 99)[:20], r"gz cannot be read: Compressed"),
}


@pytest.mark.parametrize("name", FILE_FAULTS)
def test_a_bad_file_is_named(tmp_path: Path, name: str):
    content, message = FILE_FAULTS[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        open_documents(tmp_path / name)


PARQUET_FAULTS = [
    ({"texts": ["a"]}, r"without a column 'text'; did you mean 'texts'\?"),
    ({"text": [1]}, r"its column 'text' must hold strings, got int64"),
    ({"text": ["a", None]}, r"a\.parquet row 1 is null in column 'text'"),
]


@pytest.mark.parametrize(("columns", "message"), PARQUET_FAULTS)
def test_a_bad_parquet_column_is_named(
    tmp_path: Path, columns: dict[str, list[Any]], message: str
):
    path = write_parquet(tmp_path / "a.parquet", columns)
    with pytest.raises(ValueError, match=message):
        open_documents(path)


def test_parquet_without_pyarrow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_parquet(tmp_path / "a.parquet", {"text": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'dew-bridge\[parquet\]'"):
        open_documents(path)


ADDRESS_FAULTS = {
    "nowhere.txt": "nowhere.txt does not exist",
    "nosuch://a.txt": "nosuch://a.txt cannot be opened: Protocol not known: nosuch",
}


@pytest.mark.parametrize(("address", "message"), ADDRESS_FAULTS.items())
def test_a_bad_address_is_named(address: str, message: str):
    with pytest.raises(ValueError, match=message):
        open_documents(address)


def test_a_folder_without_text_is_named_with_what_it_holds(tmp_path: Path):
    with pytest.raises(ValueError, match=r"\.parquet; it holds nothing"):
        open_documents(tmp_path)
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(ValueError, match=r"\.parquet; it holds README\.md"):
        open_documents(tmp_path)


def test_all_faults_of_all_files_are_raised_at_once(tmp_path: Path):
    write_lines(tmp_path / "a.jsonl", [{"text": "a"}, {"t": 1}, [], {"text": 2}])
    (tmp_path / "b.txt").write_text("")
    with pytest.raises(ValueError, match="the data cannot be read") as caught:
        open_documents(tmp_path, tmp_path / "missing")
    places = ("a.jsonl:2", "a.jsonl:3", "a.jsonl:4", "b.txt is empty", "missing does")
    assert all(place in str(caught.value) for place in places)


def test_a_file_of_many_faults_shows_the_first_and_counts_the_rest(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", [{}] * 25)
    with pytest.raises(ValueError, match=r"jsonl:10 .*\n.*15 more faults") as caught:
        open_documents(path)
    assert "a.jsonl:11" not in str(caught.value)


def test_a_document_too_large_to_tokenize_is_refused(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * (2**26 + 1))
    with pytest.raises(ValueError, match=r"64 MiB \(number 0\); split it"):
        open_documents(path)


def test_no_address_is_an_error():
    with pytest.raises(ValueError, match="name at least one file or folder"):
        open_documents()
