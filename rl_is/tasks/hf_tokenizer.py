"""A tokenizer in Hugging Face's files (extra `hf`). Floor 2."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class HfTokenizer:
  """tokenizer.json of a directory; its end and padding from generation_config.

  A template with "{prompt}" in it stands for a chat format, special tokens
  written out.
  """
  directory: str
  template: str = "{prompt}"

  def __post_init__(self):
    if "{prompt}" not in self.template:
      raise ValueError("template: expected {prompt} somewhere in it, got "
                       f"{self.template!r}")
    _ = self.eos_ids  # read now: what is missing is said before anything runs

  @functools.cached_property
  def _inner(self):
    try:
      import tokenizers  # an extra: who asks for it pays
    except ImportError as error:
      raise ImportError("a tokenizer in Hugging Face's files needs tokenizers: "
                        "pip install 'rl_is[hf]'") from error
    path = pathlib.Path(self.directory) / "tokenizer.json"
    if not path.exists():
      raise ValueError(f"tokenizer: no file {path}")
    return tokenizers.Tokenizer.from_file(str(path))

  @functools.cached_property
  def _settings(self) -> dict:
    out = {}
    for name in ("config.json", "generation_config.json"):  # the later one wins
      path = pathlib.Path(self.directory) / name
      if path.exists():
        out |= {k: v for k, v in json.loads(path.read_text()).items()
                if v is not None}
    return out

  @functools.cached_property
  def eos_ids(self) -> tuple[int, ...]:
    ids = self._settings.get("eos_token_id")
    if ids is None:
      raise ValueError(f"tokenizer: {self.directory} has no eos_token_id in "
                       "generation_config.json or config.json")
    ids = (ids,) if isinstance(ids, int) else tuple(ids)
    if not all(0 <= i < self.vocab_size for i in ids):
      raise ValueError(f"tokenizer: eos_token_id: expected ids in [0, "
                       f"{self.vocab_size}), got {ids}")
    return ids

  @functools.cached_property
  def pad_id(self) -> int:
    return self._settings.get("pad_token_id", self.eos_ids[0])

  @functools.cached_property
  def vocab_size(self) -> int:
    return self._inner.get_vocab_size()

  def encode(self, text: str) -> list[int]:
    """Ids of the text alone."""
    return self._inner.encode(text, add_special_tokens=False).ids

  def encode_prompt(self, text: str) -> list[int]:
    """The text in the template, after the BOS of models that have one."""
    return self._inner.encode(self.template.replace("{prompt}", text)).ids

  def decode(self, ids: Iterable[int]) -> str:
    """Text before the first EOS; other special tokens stand for nothing."""
    kept = []
    for i in map(int, ids):
      if i in self.eos_ids:
        break
      if i < self.vocab_size:  # a model's table may be larger
        kept.append(i)
    return self._inner.decode(kept)
