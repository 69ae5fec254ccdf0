"""All about a model's text in one object: what router and workers load at their start."""

from text.chat_template import ChatTemplate
from text.model_resolver import ModelFiles
from text.tokenizer import load_tokenizer


class TextProcessor:
    """`metadata`, `tokenizer` and `template` of one model. Immutable; may be used from any thread."""

    def __init__(self, files: ModelFiles) -> None:
        """Loads the tokenizer (about 0.3 s). Raises ModelError."""
        self.metadata = files.metadata
        self.tokenizer = load_tokenizer(files)
        self.template = ChatTemplate(self.metadata, self.tokenizer)
