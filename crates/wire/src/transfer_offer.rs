//! An offer of KV in a router's hands: what a worker answered to a leg that it holds KV for, and all that it was made for.
//!
//! An engine believes the params that it is given. With another prompt of the same length it answers 200 from the wrong KV; with
//! a longer prompt it dies (vLLM 0.32); after a restart of either side the blocks that they name are somebody else's. So
//! params exist outside of an [`Offer`] only on their way to an engine: an offer is made from the answer of one leg under
//! its [`Terms`], has no copy, and is given up for its params once, by whoever can name the same terms before the deadline.
//!
//! What it does not do: it cannot tell whether the KV is still there. The engine that pulls finds that out and says so.

use crate::transfer_params::TransferParams;
use bytes::Bytes;
use homing_kv::BlockHash;
use homing_units::{BootEpoch, Instant, WorkerId};
use std::fmt;
use thiserror::Error;

/// One life of one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life {
    /// The worker.
    pub worker: WorkerId,
    /// Which of its lives; 0 where nobody knows.
    pub epoch: BootEpoch,
}

/// What an offer is made for. Whoever uses it has to mean the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The hash of the whole prompt ([`prompt_hash`](crate::transfer_params::prompt_hash)).
    pub prompt: BlockHash,
    /// Who holds the KV.
    pub source: Life,
    /// Who is to pull it.
    pub target: Life,
}

/// What a leg answered that was asked to hold its prompt's KV.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeldAnswer {
    /// Its `kv_transfer_params`, word for word; `None` where they are missing or null.
    pub params: Option<Bytes>,
    /// Tokens that the engine counted in its prompt.
    pub prompt_tokens: Option<u32>,
}

/// KV on offer. It has no copy, and using it uses it up:
///
/// ```compile_fail
/// # fn twice(offer: homing_wire::transfer_offer::Offer, terms: &homing_wire::transfer_offer::Terms) {
/// let now = homing_units::Instant::ZERO;
/// let first = offer.redeem(terms, now);
/// let second = offer.redeem(terms, now);
/// # }
/// ```
pub struct Offer {
    params: Bytes,
    terms: Terms,
    deadline: Instant,
}

/// Why KV on offer must not be pulled. All of them are failed transfers.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Doubt {
    /// There is no offer: an engine without a connector, or without room to hold the blocks, answers none.
    #[error("expected `kv_transfer_params` in the answer of the leg that holds the kv, found none")]
    Missing,
    /// It cannot be read.
    #[error("expected an offer of kv, found `kv_transfer_params` that cannot be read: {0}")]
    Malformed(String),
    /// It offers nothing.
    #[error("expected an offer of kv, found `do_remote_prefill` false")]
    NotAnOffer,
    /// An engine that is offered fewer tokens than its prompt has dies of it.
    #[error("expected an offer of the whole prompt of `{prompt}` tokens, found `{offered}`")]
    Partial {
        /// Tokens on offer.
        offered: u32,
        /// Tokens that the source counted in its prompt.
        prompt: u32,
    },
    /// It was made for another prompt.
    #[error("expected an offer for this prompt, found one for another")]
    OtherPrompt,
    /// It was made by, or for, another worker or another life of one.
    #[error("expected an offer of {expected}, found one of {found}")]
    OtherLife {
        /// Who takes part now.
        expected: Life,
        /// Who took part when it was made.
        found: Life,
    },
    /// Its source may have let the KV go.
    #[error("the offer of kv has expired, expected it to be used within its lease")]
    Expired,
}

impl Offer {
    /// The offer that a leg's answer makes, good until `deadline`.
    ///
    /// # Errors
    /// The answer makes none, or none that could be used.
    pub fn of_answer(answer: &HeldAnswer, terms: Terms, deadline: Instant) -> Result<Self, Doubt> {
        let json = answer.params.as_ref().filter(|json| json.as_ref() != b"null");
        let json = json.ok_or(Doubt::Missing)?;
        let params = TransferParams::parse(json).map_err(|error| Doubt::Malformed(error.message))?;
        if !params.do_remote_prefill {
            return Err(Doubt::NotAnOffer);
        }
        if let (Some(offered), Some(prompt)) = (params.remote_num_tokens, answer.prompt_tokens)
            && offered != prompt
        {
            return Err(Doubt::Partial { offered, prompt });
        }
        // A worker that names its life knows it better than whoever probes it.
        if let Some(epoch) = params.remote_boot_epoch
            && terms.source.epoch != BootEpoch::default()
        {
            same_life(terms.source, Life { epoch, ..terms.source })?;
        }
        Ok(Self {
            params: json.clone(),
            terms,
            deadline,
        })
    }

    /// Gives the offer up for its params, word for word.
    ///
    /// # Errors
    /// It was made for something else, or it is too late; the offer is gone either way.
    pub fn redeem(self, terms: &Terms, now: Instant) -> Result<Bytes, Doubt> {
        if self.terms.prompt != terms.prompt {
            return Err(Doubt::OtherPrompt);
        }
        same_life(terms.source, self.terms.source)?;
        same_life(terms.target, self.terms.target)?;
        if now >= self.deadline {
            return Err(Doubt::Expired);
        }
        Ok(self.params)
    }
}

fn same_life(expected: Life, found: Life) -> Result<(), Doubt> {
    if expected == found {
        Ok(())
    } else {
        Err(Doubt::OtherLife { expected, found })
    }
}

impl fmt::Display for Life {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` in life `{}`", self.worker, self.epoch)
    }
}

impl fmt::Debug for Offer {
    /// Without the params: whoever reads them in a log could use them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Offer")
            .field("terms", &self.terms)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer_params::prompt_hash;
    use homing_units::Duration;

    const PARAMS: &str = r#"{"do_remote_prefill":true,"remote_num_tokens":3, "odd":1.50}"#;

    fn terms() -> Terms {
        let life = |worker, epoch| Life {
            worker: WorkerId(worker),
            epoch: BootEpoch(epoch),
        };
        Terms {
            prompt: prompt_hash(&[1, 2, 3]),
            source: life(0, 7),
            target: life(1, 8),
        }
    }

    fn at(seconds: u64) -> Instant {
        Instant::ZERO + Duration::from_secs(seconds)
    }

    fn offered(json: &str, prompt_tokens: Option<u32>) -> Result<Offer, Doubt> {
        let answer = HeldAnswer {
            params: Some(Bytes::copy_from_slice(json.as_bytes())),
            prompt_tokens,
        };
        Offer::of_answer(&answer, terms(), at(30))
    }

    #[test]
    fn an_offer_is_used_as_it_was_made() {
        let offer = offered(PARAMS, Some(3)).expect("an offer of the whole prompt");
        assert!(!format!("{offer:?}").contains("odd"));
        assert_eq!(
            offer.redeem(&terms(), at(29)),
            Ok(Bytes::from_static(PARAMS.as_bytes())),
            "word for word"
        );
    }

    /// Each of them would be answered from the wrong KV, or kill an engine.
    #[test]
    fn nobody_else_can_use_it() {
        let check = |used_for: Terms, now: Instant, expected: Doubt| {
            let offer = offered(PARAMS, None).expect("an offer");
            assert_eq!(offer.redeem(&used_for, now), Err(expected));
        };
        let other = |change: fn(&mut Terms)| {
            let mut terms = terms();
            change(&mut terms);
            terms
        };
        // The same length, and another prompt.
        check(
            other(|terms| terms.prompt = prompt_hash(&[1, 2, 4])),
            at(0),
            Doubt::OtherPrompt,
        );
        for change in [(|terms| terms.source.epoch.0 += 1) as fn(&mut Terms), |terms| {
            terms.source.worker.0 += 9
        }] {
            let (expected, found) = (other(change).source, terms().source);
            check(other(change), at(0), Doubt::OtherLife { expected, found });
        }
        for change in [(|terms| terms.target.epoch.0 += 1) as fn(&mut Terms), |terms| {
            terms.target.worker.0 += 9
        }] {
            let (expected, found) = (other(change).target, terms().target);
            check(other(change), at(0), Doubt::OtherLife { expected, found });
        }
        check(terms(), at(30), Doubt::Expired);
    }

    #[test]
    fn what_is_no_offer_is_none() {
        let check = |json: &str, prompt_tokens: Option<u32>, expected: fn(&Doubt) -> bool| {
            let doubt = offered(json, prompt_tokens).expect_err(json);
            assert!(expected(&doubt), "{json} {prompt_tokens:?}: {doubt}");
        };
        assert_eq!(
            Offer::of_answer(&HeldAnswer::default(), terms(), at(30)).expect_err("none"),
            Doubt::Missing
        );
        check("null", None, |doubt| *doubt == Doubt::Missing);
        check("[]", None, |doubt| matches!(doubt, Doubt::Malformed(_)));
        check(r#"{"do_remote_prefill":1}"#, None, |doubt| {
            matches!(doubt, Doubt::Malformed(_))
        });
        check("{}", None, |doubt| *doubt == Doubt::NotAnOffer);
        check(r#"{"do_remote_decode":true}"#, None, |doubt| {
            *doubt == Doubt::NotAnOffer
        });
        let partial = |doubt: &Doubt| matches!(doubt, Doubt::Partial { .. });
        check(
            r#"{"do_remote_prefill":true,"remote_num_tokens":96}"#,
            Some(100),
            partial,
        );
        check(
            r#"{"do_remote_prefill":true,"remote_num_tokens":100}"#,
            Some(96),
            partial,
        );
        // Who names its life must be the one that was asked.
        let reborn = r#"{"do_remote_prefill":true,"remote_boot_epoch":9}"#;
        check(reborn, None, |doubt| matches!(doubt, Doubt::OtherLife { .. }));
        for good in [
            r#"{"do_remote_prefill":true}"#,
            r#"{"do_remote_prefill":true,"remote_num_tokens":100}"#,
            r#"{"do_remote_prefill":true,"remote_boot_epoch":7}"#,
        ] {
            offered(good, Some(100)).expect(good);
        }
    }
}
