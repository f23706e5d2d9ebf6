from foveate.hybrids.training.haystack import insert, sentence_starts


def test_sentences():
    text = "Mr. Bildad spoke. “Avast!” said J. Peleg. Why? No."
    assert [text[start:] for start in sentence_starts(text)] == [
        "“Avast!” said J. Peleg. Why? No.",
        "said J. Peleg. Why? No.",
        "Why? No.",
        "No.",
    ]


def test_statements_stand_between_sentences():
    assert insert("A b. C d. E", ["X.", "Y."], [0, 1]) == "X. A b. C d. Y. E"
    assert insert("A b. C d.", ["X."], [1]) == "A b. C d. X."
    assert insert("", ["X."], [0.5]) == "X."
