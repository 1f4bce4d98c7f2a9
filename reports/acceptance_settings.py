"""The page selectors that `reports/measure_acceptance.py` measures, by name."""

from __future__ import annotations

from aspire.scheduler import SELECTOR_KINDS, SelectorSpec

BUDGETS = (0.03, 0.05, 0.07, 0.10)
MIN_PAGES = 12  # 1 sink, 8 recent and a few chosen: low enough that the ratios decide in contexts of 4k tokens
FORMS_AT = 0.07


def settings(num_layers: int) -> tuple[dict[str, SelectorSpec], dict[str, SelectorSpec]]:
    """Every kind and form at the most telling budget; every kind at the other budgets."""
    # where the paper of delta puts its selection layers in 30 layers
    layers = tuple(sorted({layer * num_layers // 30 for layer in (2, 14, 22)}))
    kinds = [
        {f"{kind}@{share:g}": SelectorSpec(kind, share, MIN_PAGES, layers=layers) for kind in SELECTOR_KINDS}
        for share in sorted(BUDGETS, key=lambda share: abs(share - FORMS_AT))
    ]
    others = {label: spec for each in kinds[1:] for label, spec in each.items()}
    return kinds[0] | forms(num_layers), others


def forms(num_layers: int) -> dict[str, SelectorSpec]:
    """Forms of `refresh` (other layer) and of `refresh-per-layer` (other layer, other power) at one budget."""
    early = num_layers * 4 // 5
    found = {f"refresh[layer={early}]@{FORMS_AT:g}": SelectorSpec("refresh", FORMS_AT, MIN_PAGES, layer=early)}
    # power 0: the lists of verification and one layer that reads everything, which is what the others pay for too
    for layer, power in ((-2, 0.0), (-2, 0.5), (-2, 1.0), (early, 0.25), (early, 0.5), (num_layers // 2, 0.25)):
        name = f"refresh-per-layer[layer={layer},power={power:g}]@{FORMS_AT:g}"
        found[name] = SelectorSpec("refresh-per-layer", FORMS_AT, MIN_PAGES, layer=layer, refresh_power=power)
    return found
