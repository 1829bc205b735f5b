//! How fast a worker is: what a step, a transfer and a reload take, in seconds. The planner's costs are in these terms.
//!
//! The closed form is that of the step-time calibration for mixtures of experts: with m tokens in a step, A pairs of a prefilled
//! token and a token that it attends to, and C tokens of context of the decoding requests,
//!
//! ```text
//! step = base + experts * (1 - e^(-wake * m)) + token * m + pair * A + context * C
//! ```
//!
//! `wake` is `-saturation * ln(1 - k/E)`. A dense model has no experts. The coefficients of the built-in figures were
//! computed with aiconfigurator-core 0.12.0, Apache-2.0, NVIDIA CORPORATION & AFFILIATES, from its vLLM tables, for
//! Qwen3-30B-A3B; the host's overhead is in `base_s`.
//!
//! It knows no worker: whose speed it is, and whether it was told or learnt, is the caller's business.

/// Hardware whose figures are built in, the default first.
pub const HARDWARE: [&str; 4] = ["h200", "h100", "h20", "b200"];

/// A number that is e to the minus this of another is lost where it is taken from it: a float has 53 bits.
const LOST: f64 = 55.0 * std::f64::consts::LN_2;

/// A worker's speed. All figures are seconds: of a step, for each token, or for each pair of tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// A step that does nothing.
    pub base_s: f64,
    /// Loading all experts.
    pub experts_s: f64,
    /// How fast the experts that a step wakes saturate with its tokens.
    pub wake: f64,
    /// Each token of a step.
    pub token_s: f64,
    /// Each pair of a prefilled token and a token that it attends to.
    pub pair_s: f64,
    /// Each token of context of a decoding request.
    pub context_s: f64,
    /// Tokens of one step at most.
    pub chunk_tokens: f64,
    /// What a leg pays once before its first step.
    pub front_s: f64,
    /// What a transfer pays before its first byte.
    pub setup_s: f64,
    /// KV of one token over a NIC.
    pub moved_token_s: f64,
    /// KV of one token from host memory.
    pub reloaded_token_s: f64,
}

/// Those who decode in the steps that a prefill takes part in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Beside {
    /// Requests.
    batch: f64,
    /// Tokens of their contexts.
    context: f64,
    /// The share of the experts that they alone leave asleep.
    asleep: f64,
}

impl Default for Speed {
    fn default() -> Self {
        Self::of("h200").expect("the default hardware is known")
    }
}

impl Speed {
    /// The built-in figures of this hardware, of [`HARDWARE`].
    #[must_use]
    pub fn of(hardware: &str) -> Option<Self> {
        // In milliseconds: base without overhead, experts, saturation, token, pair, context.
        let [base, experts, saturation, token, pair, context] = match hardware {
            "h200" => [3.743, 14.027, 0.693, 0.009_977, 1.2231e-6, 2.2553e-5],
            "h100" => [4.230, 18.809, 0.709, 0.011_000, 1.2017e-6, 3.161e-5],
            "h20" => [3.97, 15.76, 0.70, 0.0452, 5.78e-6, 2.657e-5],
            "b200" => [2.921, 9.638, 0.471, 0.004_983, 6.137e-7, 1.3634e-5],
            _ => return None,
        };
        const OVERHEAD_MS: f64 = 0.7;
        // Eight of 128 experts for each token.
        let wake = -saturation * libm::log(1.0 - 8.0 / 128.0);
        const KV_BYTES: f64 = 98_304.0;
        Some(Self {
            base_s: (base + OVERHEAD_MS) / 1e3,
            experts_s: experts / 1e3,
            wake,
            token_s: token / 1e3,
            pair_s: pair / 1e3,
            context_s: context / 1e3,
            chunk_tokens: 8_192.0,
            front_s: 0.025,
            setup_s: 0.003,
            // One NIC of 400 Gb/s, and PCIe 5.
            moved_token_s: KV_BYTES / 40e9,
            reloaded_token_s: KV_BYTES / 50e9,
        })
    }

    /// A step of so many tokens and pairs beside so much context.
    #[must_use]
    pub fn step_s(&self, tokens: f64, pairs: f64, context: f64) -> f64 {
        self.base_s
            + self.experts_s * (1.0 - libm::exp(-self.wake * tokens))
            + self.token_s * tokens
            + self.pair_s * pairs
            + self.context_s * context
    }

    /// A step in which `batch` requests with so much context together decode, and nobody prefills.
    #[must_use]
    pub fn decode_s(&self, batch: f64, context: f64) -> f64 {
        self.beside(batch, context).step_s(self)
    }

    /// So many requests that decode with so much context together: what does not change with what is prefilled beside them.
    #[must_use]
    pub fn beside(&self, batch: f64, context: f64) -> Beside {
        Beside {
            batch,
            context,
            asleep: libm::exp(-self.wake * batch),
        }
    }

    /// By how much the prefill of so many tokens and pairs makes the steps longer in which it takes part: what it costs each
    /// request that decodes beside it.
    ///
    /// In n steps of one chunk each, n * step(chunk + batch) - n * step(batch).
    #[must_use]
    pub fn stall_s(&self, tokens: f64, pairs: f64, beside: &Beside) -> f64 {
        if tokens <= 0.0 {
            return 0.0;
        }
        let steps = self.steps(tokens, beside.batch);
        let chunk = tokens / steps;
        // An exponential costs more than all the rest, and what a long chunk leaves asleep is too little to be seen.
        let left = if self.wake * chunk > LOST {
            0.0
        } else {
            libm::exp(-self.wake * (beside.batch + chunk))
        };
        steps * self.experts_s * (beside.asleep - left) + self.token_s * tokens + self.pair_s * pairs
    }

    /// How long the prefill of so many tokens and pairs takes beside those who decode.
    #[must_use]
    pub fn prefill_s(&self, tokens: f64, pairs: f64, beside: &Beside) -> f64 {
        if tokens <= 0.0 {
            return 0.0;
        }
        self.stall_s(tokens, pairs, beside) + self.steps(tokens, beside.batch) * beside.step_s(self)
    }

    /// Tokens of a prompt this long that a step may prefill beside `batch` requests that decode with so much context, so that it
    /// takes `longest_s` at most. The step turned round, with all experts loaded and each token attending to the whole prompt:
    ///
    /// tokens = (longest - base - experts - token * batch - context * C) / (token + pair * prompt)
    ///
    /// Infinite where a chunk as long as the engine takes stays within that.
    #[must_use]
    pub fn tokens_within(&self, longest_s: f64, prompt_tokens: f64, batch: f64, context: f64) -> f64 {
        let left_s = longest_s - self.base_s - self.experts_s - self.token_s * batch - self.context_s * context;
        let tokens = (left_s / (self.token_s + self.pair_s * prompt_tokens)).max(0.0);
        if tokens >= self.chunk_tokens - batch {
            f64::INFINITY
        } else {
            tokens
        }
    }

    /// Steps that the prefill of so many tokens takes part in: decoding comes first, chunks get what is left.
    pub(crate) fn steps(&self, tokens: f64, batch: f64) -> f64 {
        (tokens / (self.chunk_tokens - batch).max(1.0)).ceil()
    }
}

impl Beside {
    /// A step in which they decode, and nobody prefills.
    #[must_use]
    pub fn step_s(&self, speed: &Speed) -> f64 {
        speed.base_s
            + speed.experts_s * (1.0 - self.asleep)
            + speed.token_s * self.batch
            + speed.context_s * self.context
    }
}

/// Pairs of a new token and a token that it attends to, of `new` tokens at the end of a prompt of `prompt`.
#[must_use]
pub fn pairs(new: u32, prompt: u32) -> f64 {
    let new = f64::from(new.min(prompt));
    new * (f64::from(prompt) - new / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(got: f64, expected: f64) {
        assert!(
            (got - expected).abs() < expected.abs() * 0.05,
            "{got}, expected {expected} within 5%"
        );
    }

    #[test]
    fn the_built_in_figures_are_those_of_the_calibration() {
        let h20 = Speed::of("h20").expect("known");
        // The public prefill measurements that the H20's figures were fitted to.
        check(
            h20.prefill_s(8_192.0, pairs(8_192, 8_192), &h20.beside(0.0, 0.0)),
            0.583,
        );
        check(
            h20.prefill_s(32_768.0, pairs(32_768, 32_768), &h20.beside(0.0, 0.0)),
            4.52,
        );
        check(
            h20.prefill_s(65_536.0, pairs(65_536, 65_536), &h20.beside(0.0, 0.0)),
            15.4,
        );
        // Ten requests of 2,560 tokens on average on an H100: 13.1 ms a token.
        check(Speed::of("h100").expect("known").decode_s(10.0, 25_600.0), 0.0126);
        assert_eq!(Speed::of("h300"), None);
    }

    #[test]
    fn as_many_tokens_as_a_step_may_take_fill_it() {
        let speed = Speed::default();
        for (longest_s, prompt, batch, context) in [(0.05, 2e4, 0.0, 0.0), (0.1, 6e4, 8.0, 4e5), (0.2, 1e5, 32.0, 1e6)]
        {
            let tokens = speed.tokens_within(longest_s, prompt, batch, context);
            check(speed.step_s(tokens + batch, tokens * prompt, context), longest_s);
        }
        assert_eq!(
            speed.tokens_within(0.02, 2e4, 8.0, 4e5),
            0.0,
            "decoding alone takes longer"
        );
        assert_eq!(speed.tokens_within(10.0, 2e4, 8.0, 4e5), f64::INFINITY);
    }

    #[test]
    fn a_prefill_stalls_others_for_what_it_adds_to_their_steps() {
        let speed = Speed::default();
        let (tokens, pairs) = (20_000.0, pairs(20_000, 20_000));
        let alone = speed.prefill_s(tokens, pairs, &speed.beside(0.0, 0.0));
        let eight = speed.beside(8.0, 100_000.0);
        let beside = speed.prefill_s(tokens, pairs, &eight);
        let stall = speed.stall_s(tokens, pairs, &eight);
        assert!(beside > alone && stall < beside);
        check(beside - stall, 3.0 * speed.decode_s(8.0, 100_000.0));
        assert_eq!(speed.stall_s(0.0, 0.0, &eight), 0.0);
        assert_eq!(speed.prefill_s(0.0, 0.0, &eight), 0.0);
    }

    #[test]
    fn what_is_not_computed_would_not_be_seen() {
        let speed = Speed::default();
        for batch in [0.0, 1.0, 7.0, 40.0, 200.0] {
            for tokens in 1..4_000 {
                let tokens = f64::from(tokens);
                let asleep = libm::exp(-speed.wake * batch) - libm::exp(-speed.wake * (batch + tokens));
                let whole = speed.experts_s * asleep + speed.token_s * tokens;
                let got = speed.stall_s(tokens, 0.0, &speed.beside(batch, 0.0));
                assert_eq!(got.to_bits(), whole.to_bits(), "{tokens} tokens beside {batch}");
            }
        }
    }
}
