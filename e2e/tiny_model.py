"""A tiny random Llama in a Hugging Face folder: seeded weights, a byte-level BPE, a chat template that takes tools.

    tiny_model.py FOLDER

Its answers are noise, and the same noise everywhere: what a test needs to tell whether a token was computed from the
right KV. Weights are of single precision: in half precision the order of additions, which differs between a prompt that is
computed at once and one that is computed in parts, decides between two tokens about once in fifty. The tokenizer is trained on the standard library's own sources, the one text that every Python has.
"""

import glob
import json
import os
import sys
import sysconfig

# A part of the folder's stamp: a change of anything below makes the model anew.
VERSION = "4"
SEED = 20261130
VOCABULARY = 8192
CONTEXT = 32768
TRAINING_CHARACTERS = 3_000_000
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# Tools are listed as agents' models do; a call is rendered in the form that vLLM's `hermes` parser reads. An assistant's
# message may come without content (a pure tool call), so may a tool's.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content or '' }}
{% endif %}Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}
{{ message.content if message.content is string else '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def sources():
    """The standard library's modules, in a fixed order, up to a bound."""
    characters = 0
    for path in sorted(glob.glob(sysconfig.get_paths()["stdlib"] + "/*.py")):
        with open(path, encoding="utf8", errors="ignore") as file:
            text = file.read()
        yield text
        characters += len(text)
        if characters > TRAINING_CHARACTERS:
            return


def make_tokenizer(folder):
    """Trains and writes the tokenizer; returns the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(sources(), trainer)
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf8") as file:
        json.dump(config, file, indent=1)
    return tokenizer.get_vocab_size()


def make_weights(folder, vocabulary):
    """Draws and writes the weights: 4 layers, 256 wide, about 7 million parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.08,
    )
    LlamaForCausalLM(config).to(torch.float32).eval().save_pretrained(folder, safe_serialization=True)


def main():
    folder = sys.argv[1]
    stamp = os.path.join(folder, "made")
    if os.path.exists(stamp) and open(stamp, encoding="utf8").read() == VERSION:
        return
    os.makedirs(folder, exist_ok=True)
    make_weights(folder, make_tokenizer(folder))
    with open(stamp, "w", encoding="utf8") as file:
        file.write(VERSION)


if __name__ == "__main__":
    main()
