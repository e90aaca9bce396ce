"""Intervals, betting tests, clustering by prompt, multiplicity and sample sizes.

The unit of statistics is the prompt.  Verdicts use Clopper-Pearson (proportion of prompts) and the
betting bound (means and rates per prompt); both hold at every sample size.  `display` intervals
are for looking and for comparison only.
"""

from kernel_contracts.confidence.betting import MeanBounds, MeanTest, mean_bounds, mean_test
from kernel_contracts.confidence.clusters import PromptSums, by_prompt, prompt_order
from kernel_contracts.confidence.display import (
    DesignEffect,
    cluster_bootstrap,
    design_effect,
    hoeffding,
    maurer_pontil,
    normal_bounds,
    wilson,
)
from kernel_contracts.confidence.eprocess import EProcess
from kernel_contracts.confidence.multiplicity import (
    Rejections,
    benjamini_yekutieli,
    e_bh,
    holm,
    intersection_union,
)
from kernel_contracts.confidence.planning import (
    betting_n,
    mean_n,
    power_n,
    prompts_to_decide,
    zero_failure_n,
)
from kernel_contracts.confidence.proportions import clopper_pearson, proportion_p_value
from kernel_contracts.confidence.vectors import (
    SquaredNorm,
    split_half_cosine,
    u_statistic_sq_norm,
)

__all__ = [
    "DesignEffect",
    "EProcess",
    "MeanBounds",
    "MeanTest",
    "PromptSums",
    "Rejections",
    "SquaredNorm",
    "benjamini_yekutieli",
    "betting_n",
    "by_prompt",
    "clopper_pearson",
    "cluster_bootstrap",
    "design_effect",
    "e_bh",
    "hoeffding",
    "holm",
    "intersection_union",
    "maurer_pontil",
    "mean_bounds",
    "mean_n",
    "mean_test",
    "normal_bounds",
    "power_n",
    "prompt_order",
    "prompts_to_decide",
    "proportion_p_value",
    "split_half_cosine",
    "u_statistic_sq_norm",
    "wilson",
    "zero_failure_n",
]
