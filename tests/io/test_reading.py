import io
import lzma
import tarfile

import pytest

from foveate.errors import DataError
from foveate.io import reading
from foveate.io.digest import digest

BOOK = (
    "\ufeffThe Project Gutenberg eBook of Nothing\r\n\r\n*** START OF THE PROJECT GUTENBERG EBOOK NOTHING ***\r\n"
    "Call me Ishmael.\r\nSome years ago.\r\n*** END OF THE PROJECT GUTENBERG EBOOK NOTHING ***\r\nThe licence.\r\n"
)


def archive(path, **books):
    with tarfile.open(path, "w:xz") as tar:
        for name, content in books.items():
            member = tarfile.TarInfo(f"{name}.txt")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def test_text_plain_and_compressed(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffé\r\nb\rc\n".encode())
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress("é\nb\nc\n".encode()))
    assert reading.read_text(tmp_path / "a.txt") == reading.read_text(tmp_path / "a.txt.xz") == "é\nb\nc\n"


def test_errors_name_file_and_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\nfine\nb\xff\n")
    (tmp_path / "a.json").write_text('{"a": 1,\n "b" 2}')
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": }\n')
    (tmp_path / "a.xz").write_bytes(b"not xz")
    with pytest.raises(DataError, match=r"a\.txt:3: not UTF-8 \(byte 0xff\)"):
        reading.read_text(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"a\.json:2: malformed JSON, column 6"):
        reading.read_json(tmp_path / "a.json")
    with pytest.raises(DataError, match=r"a\.jsonl:3: malformed JSON, column 7"):
        list(reading.read_jsonl(tmp_path / "a.jsonl"))
    with pytest.raises(DataError, match=r"a\.xz: damaged \.xz"):
        reading.read_bytes(tmp_path / "a.xz")
    with pytest.raises(DataError, match=r"none\.txt: no such file"):
        reading.read_text(tmp_path / "none.txt")


def test_jsonl_counts_lines_of_the_file(tmp_path):
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(b'{"a": 1}\n\n[2]\n'))
    assert list(reading.read_jsonl(tmp_path / "a.jsonl.xz")) == [(1, {"a": 1}), (3, [2])]


def test_gutenberg_header_and_licence_go():
    assert reading.strip_gutenberg(BOOK.replace("\r\n", "\n")) == "Call me Ishmael.\nSome years ago."
    assert reading.strip_gutenberg(" plain text\n") == "plain text"


def test_novels_from_text_files_and_from_an_archive(tmp_path):
    folder, packed = tmp_path / "a" / "books", tmp_path / "b" / "books"
    folder.mkdir(parents=True)
    packed.mkdir(parents=True)
    (folder / "two.txt").write_bytes(BOOK.encode())
    (folder / "one.txt.xz").write_bytes(lzma.compress(b"one"))
    archive(packed / "all.tar.xz", two=BOOK.encode(), one=b"one")
    expected = [reading.Novel("one", "one"), reading.Novel("two", "Call me Ishmael.\nSome years ago.")]
    assert reading.read_novels(tmp_path / "a") == reading.read_novels(tmp_path / "b") == expected
    assert reading.read_novels(folder) == expected


def test_missing_and_damaged_novels(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        reading.read_novels(tmp_path / "none")
    with pytest.raises(DataError, match="no novels found"):
        reading.read_novels(tmp_path)
    archive(tmp_path / "a.tar.xz", bad=b"line\n\xc3(")
    with pytest.raises(DataError, match=r"a\.tar\.xz!bad\.txt:2: not UTF-8"):
        reading.read_novels(tmp_path)
    whole = (tmp_path / "a.tar.xz").read_bytes()
    (tmp_path / "a.tar.xz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a\.tar\.xz: damaged .xz file"):
        reading.read_novels(tmp_path)
    (tmp_path / "a.tar.xz").unlink()
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(DataError, match="'empty' is empty"):
        reading.read_novels(tmp_path)


def test_digest_follows_names_and_contents_only(tmp_path):
    for folder, content in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "book.txt").write_text(content)
    a, b, c = (digest([tmp_path / folder / "book.txt"]) for folder in "abc")
    assert a == b != c


def test_the_sample_is_small_and_says_where_it_is_from(sample):
    assert sum(path.stat().st_size for path in sample.rglob("*") if path.is_file()) <= 310_000
    (novel,) = reading.read_novels(sample)
    assert len(novel.text) > 100_000
    assert "Gutenberg" not in novel.text
    licence = (sample / "README.md").read_text(encoding="utf-8")
    assert "CC BY-SA 4.0" in licence
    assert "public domain" in licence
