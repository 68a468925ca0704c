"""Prompts to token ids, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from maxattn_examples.digits import text
from maxattn_examples.digits.words import VOCABULARY, all_prompts

from maxattn.errors import InputError


def test_prompts_are_words_of_the_vocabulary():
    assert len(all_prompts()) == 40
    tokens = text.encode(list(all_prompts()))
    assert tokens.shape == (40, 4)
    assert [" ".join(VOCABULARY[i] for i in row) for row in tokens] == list(all_prompts())
    assert "an eight moving up" in all_prompts()


def test_short_prompts_are_padded_and_the_padding_is_masked():
    tokens = text.encode(["", "Seven", "a seven moving left"])
    assert (tokens == text.PAD).sum(1).tolist() == [4, 3, 0]
    mask = text.padding_mask(jnp.asarray(tokens)).bind(1, 4, 3, 1)
    assert mask.allowed(np.arange(1), np.arange(4))[:, 0, 0].tolist() == [
        [False, False, False, False],
        [True, False, False, False],
        [True, True, True, True],
    ]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("a sevn moving left", ("'sevn' is not", "did you mean 'seven'?")),
        ("a cat moving left", ("'cat' is not", "use the words a, an, moving")),
        ("<pad>", ("'<pad>' is not",)),
        ("a seven is moving left", ("at most 4 words, and this has 5",)),
    ],
)
def test_what_is_no_prompt_is_refused(prompt: str, words: tuple[str, ...]):
    with pytest.raises(InputError) as error:
        text.encode(["an eight moving up", prompt])
    assert all(word in str(error.value) for word in (repr(prompt), *words))


def test_dropped_prompts_are_empty_and_as_many_as_asked():
    tokens = jnp.asarray(text.encode(["a seven moving left"] * 1000))
    dropped = text.drop(tokens, 0.25, jax.random.key(0))
    empty = (dropped == text.PAD).all(-1)
    assert 200 < int(empty.sum()) < 300
    assert (dropped[~empty] == tokens[0]).all()
    assert (text.drop(tokens, 0.0, jax.random.key(0)) == tokens).all()
