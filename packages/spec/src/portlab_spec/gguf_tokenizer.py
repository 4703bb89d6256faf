"""The `tokenizer.json` of Gemma 3, rebuilt from the vocabulary in a GGUF file.

GGUF keeps the SentencePiece vocabulary (pieces, scores, types) and no merges. The merges, their order and the
pipeline around them come out as in Google's own `tokenizer.json`, except that the tokens FunctionGemma
defines carry its names and `<image_soft_token>`, which has no embedding row here, is left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from portlab_spec.errors import UserError
from portlab_spec.tokenizer import FUNCTION_TOKENS

SPACE = "▁"
# Kinds of piece, as GGUF numbers them (tokenizer.ggml.token_type).
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
# Tokens that `skip_special_tokens` drops. FunctionGemma keeps its control tokens, except the one it stops at.
SPECIAL_TOKENS = frozenset(
    {
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<start_function_response>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<start_of_image>",
        "<end_of_image>",
    }
)
_PLACEHOLDER = "<unused"


def tokenizer_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Build the content of `tokenizer.json`.

    Args:
        metadata: of the GGUF file; `tokenizer.ggml.{tokens,scores,token_type}` are used.

    Raises:
        UserError: the vocabulary has no room for the control tokens of FunctionGemma at their ids.
    """
    kinds = metadata["tokenizer.ggml.token_type"]
    # llama.cpp stores user-defined runs of spaces as spaces; the vocabulary proper writes every space as "▁".
    pieces = [piece.replace(" ", SPACE) for piece in metadata["tokenizer.ggml.tokens"]]
    for token, token_id in FUNCTION_TOKENS.items():
        if token_id >= len(pieces) or not pieces[token_id].startswith(_PLACEHOLDER):
            raise UserError(f"id {token_id} of the vocabulary is not free for {token}", fix="Use Gemma 3")
        pieces[token_id] = token

    bos = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    second_bos = {"SpecialToken": {"id": "<bos>", "type_id": 1}}
    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    bos_id = pieces.index("<bos>")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(pieces, kinds),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, first],
            "pair": [bos, first, second_bos, second],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [bos_id], "tokens": ["<bos>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": merges_of(pieces, metadata["tokenizer.ggml.scores"], kinds),
        },
    }


def tokenizer_config() -> dict[str, Any]:
    """The content of `tokenizer_config.json`: what transformers needs beside `tokenizer.json`."""
    return {
        # The generic class takes tokenizer.json as it is; GemmaTokenizer would rebuild parts of it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "padding_side": "left",
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
    }


def merges_of(pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[list[str]]:
    """Pairs of pieces that join to a piece, in the order BPE applies them.

    SentencePiece joins the pair whose result scores highest. Ties (all user-defined pieces score 0) go to the
    longer left part, then the longer right part, as in transformers' SentencePiece converters.
    """
    ids = {piece: i for i, piece in enumerate(pieces)}
    ranked = []
    for piece, score, kind in zip(pieces, scores, kinds, strict=True):
        if kind not in (NORMAL, USER_DEFINED):
            continue
        splits = ((ids.get(piece[:k]), ids.get(piece[k:])) for k in range(1, len(piece)))
        pairs = sorted((left, right) for left, right in splits if left is not None and right is not None)
        priority = 0.0 if kind == USER_DEFINED else score  # llama.cpp overwrites their score with -1000
        ranked += [(priority, len(pieces[left]), len(pieces[right]), left, right) for left, right in pairs]
    ranked.sort(key=lambda entry: entry[:3], reverse=True)
    return [[pieces[left], pieces[right]] for *_, left, right in ranked]


def _added_tokens(pieces: Sequence[str], kinds: Sequence[int]) -> list[dict[str, Any]]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": i, "content": piece, **plain, "special": piece in SPECIAL_TOKENS}
        for i, (piece, kind) in enumerate(zip(pieces, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
