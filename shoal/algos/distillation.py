"""On-policy distillation: the student writes, and every token is judged by the teacher's log-probs (arXiv:2306.13649).

Called by `train/teacher`, in runs with a teacher: it takes the advantages. Pure; it knows neither model. The student's
own samples are what it will meet when it writes alone, and reverse KL makes it take one of the teacher's ways rather than
the mean of them.

    symbol   meaning                                                                         argument
    pi       the student; pi(v | s_n) of every token v in the state before token n           logp_NV
    p        the teacher, in the same states                                                 teacher_logp_NV
    D_n      sum_v pi(v) (log pi(v) - log p(v)): reverse KL in that state, nats
    L        (1 / sum_i |o_i|) sum_n D_n; the gradient flows through pi, not through the states
    A_n      log p(o_n) - log pi(o_n): minus the part of the token that was written          logp_N, teacher_logp_N

`reverse_kl` needs the teacher's whole distribution; `distillation_advantages` only its log-prob of each token that was
written, and goes into a policy loss in the place of an advantage. In expectation over the token both have the same
gradient, and the first has less variance.

Changed from the paper: only its on-policy case (lambda = 1) with reverse KL, which MiniLLM (arXiv:2306.08543) takes, too.
Each token is judged by its own state alone: what it does to later states gets no credit, as in the paper.

Axes: N policy tokens of a micro-batch; V vocabulary.
"""

from torch import Tensor


def reverse_kl(logp_NV: Tensor, teacher_logp_NV: Tensor, weight_N: Tensor, *, num_tokens: float) -> Tensor:
    """L, scalar, nats per token. `num_tokens` counts the policy tokens of the whole batch."""
    D_N = (logp_NV.exp() * (logp_NV - teacher_logp_NV.detach())).sum(-1)
    return (weight_N * D_N).sum() / num_tokens


def distillation_advantages(logp_N: Tensor, teacher_logp_N: Tensor) -> Tensor:
    """A of each token, without gradient."""
    return (teacher_logp_N - logp_N).detach()
