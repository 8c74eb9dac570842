"""Text tables, Banking77, Sentiment140, Shakespeare and the text side of LEAF."""

from __future__ import annotations

import gzip
import json
import sys
import types

import numpy as np
import pytest
import torch
from data_files import real_data

from consilience.core.settings import Invalid
from consilience.data.datasets import load
from consilience.data.datasets.prepare.texts import build_vocabulary, split_words, token_numbers

TRAIN = 'text,label\n"The cat, the hat",a\nA dog!,b\nthe end,a\nthe,b\n'
TEST = "text,label\nthe zebra,b\n"


def words(data, x):
    return [[data.vocabulary[token] for token in row] for row in x.tolist()]


def test_words_are_numbered_by_frequency_from_training_rows(tmp_path):
    (tmp_path / "train.csv").write_text(TRAIN)
    (tmp_path / "test.csv").write_text(TEST)
    data = load("text_table", data_dir=tmp_path, train="train.csv", test="test.csv", length=5)
    assert data.vocabulary[:4] == ("<pad>", "<unk>", "the", "!")  # the 4 times, others once, alphabetical
    assert words(data, data.x)[0] == ["the", "cat", ",", "the", "hat"]
    assert words(data, data.x)[1] == ["a", "dog", "!", "<pad>", "<pad>"]
    assert data.test_x.tolist() == [[2, 1, 0, 0, 0]] and data.x.dtype == torch.int64
    assert data.label_names == ("a", "b") and data.y.tolist() == [0, 1, 0, 1] and data.test_y.tolist() == [1]


def test_vocabulary_can_be_cut(tmp_path):
    (tmp_path / "train.csv").write_text(TRAIN)
    (tmp_path / "test.csv").write_text(TEST)
    data = load("text_table", data_dir=tmp_path, train="train.csv", test="test.csv", max_vocabulary=3)
    assert data.vocabulary == ("<pad>", "<unk>", "the") and data.x.max() == 2


def test_characters(tmp_path):
    (tmp_path / "t.tsv").write_text("text\tlabel\nabba\tx\nab\ty\n")
    options = {"train": "t.tsv", "features": "characters", "length": 3, "test_fraction": 0.5}
    data = load("text_table", data_dir=tmp_path, **options)
    both = {tuple(row) for row in [*words(data, data.x), *words(data, data.test_x)]}
    assert both == {("a", "b", "b"), ("a", "b", "<pad>")}


def test_split_keeps_words_apostrophes_and_marks():
    assert split_words("Don't stop: £5!") == ["don't", "stop", ":", "£", "5", "!"]
    vocabulary = build_vocabulary(["b a", "b"], split_words, most=10)
    assert vocabulary == ("<pad>", "<unk>", "b", "a")
    assert token_numbers(["", "a a a"], split_words, vocabulary, length=2).tolist() == [[0, 0], [3, 3]]


def test_groups_and_their_least_size(tmp_path):
    rows = [("u1", "p"), ("u2", "q"), ("u1", "q"), ("u3", "p"), ("u1", "p"), ("u2", "p")]
    (tmp_path / "t.csv").write_text("text,label,user\n" + "".join(f"hello {u},{y},{u}\n" for u, y in rows))
    options = {"train": "t.csv", "group": "user", "test_fraction": 0.4}
    data = load("text_table", data_dir=tmp_path, **options)
    assert data.group_names == ("u1", "u2", "u3") and torch.bincount(data.groups).tolist() == [2, 1, 1]
    data = load("text_table", data_dir=tmp_path, **options, min_group_rows=2)
    assert data.group_names == ("u1", "u2") and len(data.y) + len(data.test_y) == 5
    with pytest.raises(Invalid, match="no group has 9 rows; the largest has 3"):
        load("text_table", data_dir=tmp_path, **options, min_group_rows=9)


@pytest.mark.parametrize(
    ("options", "defect"),
    [
        ({"label": "intent"}, "has no column 'intent'"),
        ({"features": "encoder"}, "needs the option encoder"),
        ({"test": "strange.csv"}, r"strange\.csv: 'zzz' of row 0 is not one of a, b"),
    ],
)
def test_wrong_text_tables(tmp_path, options, defect):
    (tmp_path / "train.csv").write_text(TRAIN)
    (tmp_path / "strange.csv").write_text("text,label\nthe,zzz\n")
    with pytest.raises(Invalid, match=defect):
        load("text_table", data_dir=tmp_path, train="train.csv", **options)


def test_encoders_are_called_with_the_texts(tmp_path, monkeypatch):
    calls = []

    def encode_texts(texts, *, encoder, batch_size=64):
        calls.append((encoder, list(texts)))
        return torch.tensor([[float(len(text))] for text in texts])

    def hashed_ngrams(texts, *, features=4096):
        return torch.ones(len(texts), features)

    stand_in = types.SimpleNamespace(encode_texts=encode_texts, hashed_ngrams=hashed_ngrams)
    monkeypatch.setitem(sys.modules, "consilience.models.encoders", stand_in)
    (tmp_path / "train.csv").write_text(TRAIN)
    (tmp_path / "test.csv").write_text(TEST)
    options = {"train": "train.csv", "test": "test.csv"}
    data = load("text_table", data_dir=tmp_path, **options, features="encoder", encoder="mini")
    assert calls[0] == ("mini", ["The cat, the hat", "A dog!", "the end", "the"]) and calls[1][1] == ["the zebra"]
    assert data.x.flatten().tolist() == [16, 6, 7, 3] and data.vocabulary == ()
    data = load("text_table", data_dir=tmp_path, **options, features="ngrams", ngram_features=8)
    assert data.x.shape == (4, 8) and data.x.dtype == torch.float32


def test_real_ngrams_tell_texts_apart(tmp_path):
    (tmp_path / "train.csv").write_text(TRAIN)
    data = load("text_table", data_dir=tmp_path, train="train.csv", features="ngrams", ngram_features=256)
    assert data.x.shape[1] == 256 and len({tuple(row) for row in data.x.tolist()}) == len(data.x)


def test_banking77_takes_the_official_order(tmp_path):
    (tmp_path / "train.csv").write_text("text,category\nhi,zebra\nho,apple\n")
    (tmp_path / "test.csv").write_text("text,category\nhi,apple\n")
    assert load("banking77", data_dir=tmp_path).label_names == ("apple", "zebra")
    (tmp_path / "categories.json").write_text('["zebra", "apple"]')
    data = load("banking77", data_dir=tmp_path)
    assert data.label_names == ("zebra", "apple") and data.y.tolist() == [0, 1] and data.test_y.tolist() == [1]


def test_sentiment140_in_both_formats(tmp_path):
    rows = [("0", "ann", "sad"), ("4", "bob", "glad"), ("4", "ann", "fun, I say"), ("0", "bob", "bad")]
    tsv = "label\tuser\tdate\ttext\n" + "".join(f"{y}\t{u}\tnow\t{t}\n" for y, u, t in rows)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "tweets.tsv.gz").write_bytes(gzip.compress(tsv.encode()))
    original = "".join(f'"{y}","1","now","NO_QUERY","{u}","{t} caf\xe9"\n' for y, u, t in rows)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "training.1600000.processed.noemoticon.csv").write_bytes(original.encode("latin-1"))
    for folder in ("a", "b"):
        data = load("sentiment140", data_dir=tmp_path / folder, by_user=True, test_fraction=0.5)
        assert data.group_names == ("ann", "bob") and data.label_names == ("negative", "positive")
        first = {words(data, data.x)[k][0]: int(data.y[k]) for k in range(2)}
        assert all(label == (word in ("glad", "fun")) for word, label in first.items())
        assert torch.bincount(data.groups).tolist() == [1, 1]
    assert "café" in load("sentiment140", data_dir=tmp_path / "b").vocabulary


def write_speeches(path, speeches):
    lines = [json.dumps({"play": play, "speaker": who, "text": text}) for play, who, text in speeches]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))


def test_shakespeare_windows_by_hand(tmp_path):
    path = tmp_path / "speeches.jsonl.gz"
    write_speeches(path, [("h", "A", "abcdef"), ("h", "B", "xy"), ("h", "A", "ghZ"), ("m", "A", "abcabcabcabc")])
    data = load("shakespeare", data_dir=tmp_path, window=3, min_characters=10)
    # role h: A says "abcdef\nghZ": 10 characters, the last 2 are the test; m: A has 12, the last 2 too
    assert data.group_names == ("h: A", "m: A")
    rows = ["".join(data.vocabulary[t] for t in row) for row in data.x.tolist()]
    targets = "".join(data.vocabulary[t] for t in data.y.tolist())
    assert rows[:5] == ["abc", "bcd", "cde", "def", "ef\n"] and targets[:5] == "def\ng"
    assert targets[5:] == "abcabca" and data.groups.tolist() == [0] * 5 + [1] * 7
    tested = ["".join(data.vocabulary[t] for t in row) for row in data.test_x.tolist()]
    assert tested == ["f\ng", "\ng<unk>", "abc"[1:] + "a", "cab"]
    assert data.test_y.tolist()[:2] == [1, 1]  # h and Z do not occur in training text
    assert data.test_groups.tolist() == [0, 0, 1, 1] and data.classes == len(data.vocabulary)
    few = load("shakespeare", data_dir=tmp_path, window=3, min_characters=10, max_windows=2)
    assert ["".join(few.vocabulary[t] for t in row) for row in few.x.tolist()][:2] == ["abc", "cde"]
    with pytest.raises(Invalid, match="no role has 500 characters"):
        load("shakespeare", data_dir=tmp_path, min_characters=500)


def write_leaf(folder, part, users, name="data_0.json"):
    (folder / part).mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(samples["y"]) for samples in users.values()],
        "user_data": users,
    }
    (folder / part / name).write_text(json.dumps(content))


def test_leaf_femnist(tmp_path):
    picture = (np.arange(784) / 784).tolist()
    write_leaf(tmp_path, "train", {"w1": {"x": [picture, picture], "y": [61, 0]}})
    write_leaf(tmp_path, "train", {"w2": {"x": [picture], "y": [10]}, "w3": {"x": [picture], "y": [3]}}, "data_1.json")
    write_leaf(tmp_path, "test", {"w2": {"x": [picture], "y": [5]}, "w1": {"x": [picture], "y": [36]}})
    data = load("leaf", data_dir=tmp_path, folder=".", task="femnist")
    assert data.x.shape == (4, 1, 28, 28) and data.x[0, 0, 1, 0] == np.float32(28 / 784)
    assert data.y.tolist() == [61, 0, 10, 3] and data.groups.tolist() == [0, 0, 1, 2]
    assert data.test_y.tolist() == [36, 5] and data.test_groups.tolist() == [0, 1]
    assert data.group_names == ("w1", "w2", "w3") and data.classes == 62 and data.label_names[36] == "a"
    large = load("leaf", data_dir=tmp_path, folder=".", task="femnist", min_samples=2)
    assert large.group_names == ("w1",) and large.test_y.tolist() == [36]
    assert load("leaf", data_dir=tmp_path, folder=".", task="femnist", max_users=2).group_names == ("w1", "w2")


def test_leaf_shakespeare_has_leafs_own_numbers(tmp_path):
    write_leaf(tmp_path, "train", {"u": {"x": ["\n !" + "a" * 77], "y": ["}"]}})
    write_leaf(tmp_path, "test", {"u": {"x": ["A" * 80], "y": ["z"]}})
    data = load("leaf", data_dir=tmp_path, folder=".", task="shakespeare")
    assert data.classes == 80 and data.x[0, :3].tolist() == [0, 1, 2] and data.y.tolist() == [79]
    assert data.vocabulary[data.test_x[0, 0]] == "A" and data.label_names[data.test_y[0]] == "z"
    write_leaf(tmp_path, "train", {"u": {"x": ["~" * 80], "y": ["a"]}})
    with pytest.raises(Invalid, match="user 'u': the character '~' is not in LEAF's alphabet"):
        load("leaf", data_dir=tmp_path, folder=".", task="shakespeare")


def test_leaf_sent140(tmp_path):
    tweet = ["1467810369", "Mon Apr 06", "NO_QUERY", "ann", "so sad today"]
    write_leaf(tmp_path, "train", {"ann": {"x": [tweet, [*tweet[:4], "so glad"]], "y": [0, "4"]}})
    write_leaf(tmp_path, "test", {"ann": {"x": [[*tweet[:4], "so"]], "y": [1]}})
    data = load("leaf", data_dir=tmp_path, folder=".", task="sent140", length=4)
    assert words(data, data.x) == [["so", "sad", "today", "<pad>"], ["so", "glad", "<pad>", "<pad>"]]
    assert data.y.tolist() == [0, 1] and data.test_y.tolist() == [1]


@pytest.mark.parametrize(
    ("users", "task", "defect"),
    [
        ({"u": {"x": [[1.0]], "y": [0, 1]}}, "features", "'u' has 1 x and 2 y where num_samples says 2"),
        ({"u": {"x": [[1.0], [1.0, 2.0]], "y": [0, 1]}}, "features", "rows of numbers of one length"),
        ({"u": {"x": [[1.0]], "y": [0]}, "v": {"x": [[1.0, 2.0]], "y": [0]}}, "features", "'v' has rows of shape"),
        ({"u": {"x": [[float("nan")]], "y": [0]}}, "features", "NaN"),
        ({"u": {"x": [[1.0]], "y": [0.5]}}, "features", "y must be whole numbers"),
        ({"u": {"x": [[1.0]], "y": [0]}}, "femnist", "784 numbers, not 1"),
        ({"u": {"x": [[0.0] * 784], "y": [62]}}, "femnist", "label 62"),
        ({"u": {"x": ["ab", "abc"], "y": ["a", "b"]}}, "shakespeare", "strings of one length"),
        ({"u": {"x": [["text"]], "y": [3]}}, "sent140", "y 0, 1 or 4"),
        ({"u": {"y": [3]}}, "sent140", "no lists x and y"),
    ],
)
def test_wrong_leaf_files(tmp_path, users, task, defect):
    write_leaf(tmp_path, "train", users)
    write_leaf(tmp_path, "test", users)
    with pytest.raises(Invalid, match=defect):
        load("leaf", data_dir=tmp_path, folder=".", task=task)


def test_leaf_folders_and_json(tmp_path):
    with pytest.raises(FileNotFoundError, match="LEAF's preprocess"):
        load("leaf", data_dir=tmp_path, folder=".", task="femnist")
    (tmp_path / "train").mkdir()
    (tmp_path / "test").mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds no \.json file"):
        load("leaf", data_dir=tmp_path, folder=".", task="femnist")
    (tmp_path / "train" / "a.json").write_text('{"users": [')
    with pytest.raises(Invalid, match=r"a\.json is not readable JSON"):
        load("leaf", data_dir=tmp_path, folder=".", task="femnist")
    (tmp_path / "train" / "a.json").write_text('{"users": []}')
    with pytest.raises(Invalid, match="not a LEAF file"):
        load("leaf", data_dir=tmp_path, folder=".", task="femnist")


def test_real_banking77():
    data = load("banking77", data_dir=real_data("banking77"))
    assert len(data.y) == 10003 and torch.bincount(data.test_y).tolist() == [40] * 77
    assert data.label_names[data.y[0]] == "card_arrival" and words(data, data.x)[0][:4] == [
        "i",
        "am",
        "still",
        "waiting",
    ]


def test_real_sentiment140_sample():
    data = load("sentiment140", data_dir=real_data("sentiment140_sample"))
    assert torch.bincount(torch.cat([data.y, data.test_y])).tolist() == [9999, 10001]


def test_real_shakespeare():
    data = load("shakespeare", data_dir=real_data("shakespeare"), max_windows=20)
    assert len(data.group_names) == 1066 and data.x.shape[1] == 80 and len(data.y) <= 1066 * 20
    assert torch.bincount(data.groups).min() >= 1 and set(data.groups.tolist()) == set(data.test_groups.tolist())
    row = "".join(data.vocabulary[t] for t in data.x[0].tolist())
    assert row.startswith("Give me leave, Caesar,--\nThou hast a sister")  # Agrippa's first words
