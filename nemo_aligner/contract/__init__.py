"""From a sample to token ids, and what a reward means: the scoring contract and its parts.

A sample takes this path, in training, evaluation and serving alike:

1. ``messages.py`` converts a raw text or conversation from outside to its normal form.
2. ``template_check.py`` checks that the chat template renders everything in it, and ``turns.py``
   that no message contains the template's own turn markers. ``steps.py`` finds its steps.
3. ``chat_template.py`` renders it to text with the chat template, which may be one of
   ``templates.py``. ``principles.py`` adds the principle by which the reply is rewarded.
4. ``tokenizer.py`` converts the text to token ids, and ``bulk_encoding.py`` whole data sets.
5. ``contract.py``: ``ScoringContract`` does steps 1 to 4, adds BOS and EOS and applies the length
   rule. ``text_encoder.py`` binds it to a tokenizer.
6. ``readout.py`` converts head outputs to rewards and their uncertainty.

``from_settings.py`` builds a contract from training settings and compares two contracts.
``fields.py`` validates a contract that was read from an archive. ``added_tokens.py`` reads
tokenizers as transformers does. ``template_trials.py`` finds what a template writes around
messages. ``sample_frame.py`` detects raw texts of another chat template. ``scorer.py`` has the
``Scorer`` protocol and ``ScoredRows``, the form of all scores.

Nothing here imports torch: clients and tokenizing processes use this package.
"""
