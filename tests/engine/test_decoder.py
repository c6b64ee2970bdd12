"""The direct decoder reads what the tokenizer reads; where the tokenizer's own Python has a say, it keeps it."""

from __future__ import annotations

from mlx_lm.tokenizer_utils import NewlineTokenizer, TokenizerWrapper
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from omlxd.engine.decoder import direct
from tests.engine.running import tokenizer
from tests.models import byte_tokenizer


def words() -> Tokenizer:
    """Whole words, which decoding joins with blanks."""
    made = Tokenizer(models.WordLevel({"?": 0, "What": 1, "n't": 2, "do": 3, ",": 4, "!": 5}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def test_a_models_tokenizer_is_read_without_the_python_around_it() -> None:
    decoder = direct(tokenizer())
    assert isinstance(decoder, Tokenizer)
    ids = [*"na\u00efve \U0001f44b".encode(), 257, 65]
    assert decoder.decode(ids, skip_special_tokens=False) == tokenizer().decode(ids, skip_special_tokens=False)


def test_a_tokenizer_that_cleans_up_after_its_decoder_is_asked_itself() -> None:
    cleans = PreTrainedTokenizerFast(tokenizer_object=words(), clean_up_tokenization_spaces=True)
    assert cleans.decode([1, 4, 5]) == "What,!"
    assert direct(cleans) is cleans
    assert direct(PreTrainedTokenizerFast(tokenizer_object=words(), clean_up_tokenization_spaces=False)) is not cleans


def test_a_tokenizer_with_a_decode_of_its_own_is_asked_itself() -> None:
    own = TokenizerWrapper(NewlineTokenizer(tokenizer_object=byte_tokenizer()))
    assert direct(own) is own


def test_what_is_no_hugging_face_tokenizer_is_asked_itself() -> None:
    made = byte_tokenizer()
    assert direct(made) is made
