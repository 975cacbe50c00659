"""Run configurations that were written for other engines.

In: a DeepSpeed or InternEvo configuration. Out: the same training on npuzero, and a ``Translation`` that reports the
decision for each key: honoured, translated, noted or refused.

Read ``rules`` (one key's rule, as data), ``translation`` (the walk over a configuration), then ``deepspeed`` or
``internevo``, one folder for each engine.
"""

from npuzero.compat.rules import ABSENT, Decision, KeyRule, KeyRules
from npuzero.compat.translation import TranslatedKey, Translation, translate_configuration

__all__ = ["ABSENT", "Decision", "KeyRule", "KeyRules", "TranslatedKey", "Translation", "translate_configuration"]
