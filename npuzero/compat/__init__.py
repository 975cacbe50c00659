"""Doors: configurations that people have for other engines go in, and the same training comes out.

``rules`` says what becomes of each key as data, ``translation`` walks a file by them and reports; each door has a
package of its own below.
"""

from npuzero.compat.rules import ABSENT, Decision, KeyRule, KeyRules
from npuzero.compat.translation import TranslatedKey, Translation, translate_configuration

__all__ = ["ABSENT", "Decision", "KeyRule", "KeyRules", "TranslatedKey", "Translation", "translate_configuration"]
