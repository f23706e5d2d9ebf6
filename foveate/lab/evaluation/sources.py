"""Where a comparison's model comes from: a folder, whose weights are loaded when they are needed, or memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foveate.integrations.transformers import loading, model_folder
from foveate.integrations.transformers.digests import weights_digest
from foveate.integrations.transformers.facts import adapted, model_facts
from foveate.integrations.transformers.support import attention_modules, decoder_of, unwrapped
from foveate.methods import Method, check_made_for


@dataclass(frozen=True)
class InFolder:
    """A model of a folder."""

    folder: Path

    def facts(self) -> dict[str, Any]:
        """What it says of the architecture. Raises `UserError` for a folder without a known model."""
        return model_folder.model_facts(self.folder)

    def digest(self) -> str:
        """What tells the model from others."""
        return model_folder.model_digest(self.folder)

    def settled(self, method: Method) -> Method:
        """A method as :func:`foveate.attach` settles it for the weights."""
        return model_folder.method_for(self.folder, method)

    def kind(self, dtype: str, device: str) -> tuple[str, str]:
        """The number format and the device. "auto" is replaced by the choice for the model and this machine."""
        device = loading.choose_device(device)
        return loading.choose_dtype(dtype, self.folder, device), device

    def tokenizer(self) -> Any:
        return loading.load_tokenizer(self.folder)

    def model(self, dtype: str, device: str) -> Any:
        return loading.load_model(self.folder, dtype, device)


@dataclass(frozen=True)
class InMemory:
    """A loaded model, as :func:`foveate.attach` takes it: quantised, with an adapter, or compiled."""

    loaded: Any
    given_tokenizer: Any

    @property
    def name(self) -> str:
        """The last part of the name that it was loaded by, or its class."""
        model = unwrapped(self.loaded)
        return Path(getattr(model, "name_or_path", "") or type(model).__name__).name

    def facts(self) -> dict[str, Any]:
        config = unwrapped(self.loaded).config
        return model_folder.architecture(config.model_type, config.get_text_config(decoder=True))

    def digest(self) -> str:
        return weights_digest(unwrapped(self.loaded))[:16]

    def settled(self, method: Method) -> Method:
        model = unwrapped(self.loaded)
        decoder = decoder_of(model)
        config = decoder.config.get_text_config(decoder=True)
        modules, _ = attention_modules(model, decoder, config)
        facts = model_facts(config, modules)
        check_made_for(method, facts)
        return method.for_model(lambda: facts | ({"weights": [None] * len(modules)} if adapted(model) else {}))

    def kind(self, dtype: str, device: str) -> tuple[str, str]:
        model = unwrapped(self.loaded)
        return str(model.dtype).removeprefix("torch."), str(model.device)

    def tokenizer(self) -> Any:
        return self.given_tokenizer

    def model(self, dtype: str, device: str) -> Any:
        return self.loaded
