"""The chat template of the tests' tokenizer, which is its own and none of the built-in ones."""

BOS, EOS = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
)
