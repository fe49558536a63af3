"""Import hooks for the SGLang server's process, found by Python at start-up because this directory is on PYTHONPATH.

- PyPI's torchvision is a CUDA build: beside a CPU torch its import fails, since it registers fake kernels for two
  operators that its library did not define. They are declared first.
- SGLang's grammar mask calls a CUDA/Triton kernel whatever the device; on CPU logits it is replaced by xgrammar's CPU
  one. Without this a constrained request ends the server.
- SGLang's deterministic inference has batch-invariant kernels for accelerators alone: none are set on a CPU.
"""

import importlib.abc
import importlib.util
import sys

_LIBRARIES = []  # the definitions live as long as the library object


def _before_torchvision():
    import torch

    if torch.version.cuda is None and not _LIBRARIES:  # newer transformers look for it before they import it
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)


def _after_grammar(module):
    import xgrammar

    original = module.XGrammarGrammar.apply_vocab_mask

    def apply_vocab_mask(logits, vocab_mask):
        if logits.device.type == "cpu":
            xgrammar.apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")
        else:
            original(logits, vocab_mask)

    module.XGrammarGrammar.apply_vocab_mask = staticmethod(apply_vocab_mask)


def _after_batch_invariant_ops(module):
    import torch

    if torch.version.cuda is None:
        module.enable_batch_invariant_mode = lambda: None


_AFTER = {
    "sglang.srt.constrained.xgrammar_backend": _after_grammar,
    "sglang.srt.batch_invariant_ops": _after_batch_invariant_ops,
}


class _Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torchvision" and name not in _AFTER:
            return None
        spec = None
        sys.meta_path.remove(self)
        try:
            if name == "torchvision":
                _before_torchvision()
            else:
                spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                _AFTER[name](module)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Hook())
