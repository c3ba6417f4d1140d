from pathlib import Path

COUNTS = Path("/app/counts.csv")


def test_there_is_a_line_per_file_in_order():
    names = [line.split(",")[0] for line in COUNTS.read_text().splitlines()]
    assert names == ["empty.txt", "harbour.txt", "list.txt"]


def test_the_words_are_counted():
    counts = dict(line.split(",") for line in COUNTS.read_text().splitlines())
    assert counts == {"empty.txt": "0", "harbour.txt": "9", "list.txt": "4"}


def test_the_notes_are_untouched():
    assert Path("/app/notes/list.txt").read_text() == "bread\nsalt\nlamp oil\n"
