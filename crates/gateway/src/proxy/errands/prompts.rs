//! The prompts that errands may carry: of each session the last one, as its tokens and what engines tell prompts apart by. No
//! message is kept, and tokens are shared with who remembers them for the next turn.
//!
//! Bounded by prompts and by tokens, the oldest request first. Nothing is kept where the policy runs no errands, and what
//! is idle goes with its session (`idle`).

use crate::proxy::legs::LegPrompt;
use homing_units::{RequestId, SessionId};
use http::HeaderMap;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Prompts that are kept.
const PROMPTS: usize = 4_096;

/// Tokens of them, all together.
const TOKENS: usize = 64 << 20;

/// A prompt that was served.
#[derive(Clone, Debug)]
pub(crate) struct Remembered {
    pub(crate) prompt: LegPrompt,
    pub(crate) headers: HeaderMap,
}

impl Remembered {
    /// Its first so many tokens, if it has as many.
    pub(crate) fn history(&self, tokens: u32) -> Option<LegPrompt> {
        let enough = self.prompt.token_count() >= tokens as usize;
        enough.then(|| self.prompt.history(tokens))
    }
}

/// The prompts.
#[derive(Debug)]
pub(crate) struct Prompts {
    /// `None` where no errand is ever run.
    kept: Option<Mutex<Kept>>,
}

#[derive(Debug, Default)]
struct Kept {
    by_request: BTreeMap<RequestId, (SessionId, Arc<Remembered>)>,
    by_session: HashMap<SessionId, RequestId>,
    tokens: usize,
}

impl Prompts {
    /// `wanted`: whether errands are run.
    pub(crate) fn new(wanted: bool) -> Self {
        Self {
            kept: wanted.then(Mutex::default),
        }
    }

    /// Whether any is kept.
    pub(crate) const fn are_wanted(&self) -> bool {
        self.kept.is_some()
    }

    /// A request of this session was planned, which is its last one.
    pub(crate) fn remember(&self, session: SessionId, request: RequestId, prompt: Remembered) {
        let Some(mut kept) = self.kept() else { return };
        if kept.by_session.get(&session).is_some_and(|last| *last > request) {
            return;
        }
        if let Some(last) = kept.by_session.insert(session, request) {
            kept.forget(last);
        }
        kept.by_session.insert(session, request);
        kept.tokens += prompt.prompt.token_count();
        kept.by_request.insert(request, (session, Arc::new(prompt)));
        while kept.by_request.len() > PROMPTS || kept.tokens > TOKENS {
            let Some(oldest) = kept.by_request.keys().next().copied() else {
                break;
            };
            kept.forget(oldest);
        }
    }

    /// The prompt of a request.
    pub(crate) fn get(&self, request: RequestId) -> Option<Arc<Remembered>> {
        let kept = self.kept()?;
        kept.by_request.get(&request).map(|(_, prompt)| Arc::clone(prompt))
    }

    /// Prompts that are kept.
    pub(crate) fn len(&self) -> usize {
        self.kept().map_or(0, |kept| kept.by_request.len())
    }

    /// The last request of whose prompt anything is known.
    pub(crate) fn mark(&self) -> Option<RequestId> {
        self.kept()?.by_request.keys().next_back().copied()
    }

    /// Forgets those of requests up to this one.
    pub(crate) fn forget_up_to(&self, mark: RequestId) {
        let Some(mut kept) = self.kept() else { return };
        while let Some(oldest) = kept.by_request.keys().next().copied().filter(|oldest| *oldest <= mark) {
            kept.forget(oldest);
        }
    }

    fn kept(&self) -> Option<MutexGuard<'_, Kept>> {
        // Nothing that is done under the lock can fail half-way.
        self.kept
            .as_ref()
            .map(|kept| kept.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Kept {
    fn forget(&mut self, request: RequestId) {
        let Some((session, prompt)) = self.by_request.remove(&request) else {
            return;
        };
        self.tokens -= prompt.prompt.token_count();
        if self.by_session.get(&session) == Some(&request) {
            self.by_session.remove(&session);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::legs::Endpoint;
    use homing_wire::openai::Body;

    fn prompt(tokens: usize) -> Remembered {
        Remembered {
            prompt: LegPrompt::original(Endpoint::Chat, Arc::new(Body::default()), vec![7; tokens].into()).slim(),
            headers: HeaderMap::new(),
        }
    }

    #[test]
    fn the_last_prompt_of_each_session_is_kept_within_bounds() {
        let prompts = Prompts::new(true);
        for request in 0..6_000 {
            prompts.remember(SessionId(request / 2), RequestId(request), prompt(10));
        }
        assert_eq!(prompts.len(), 3_000, "one of each session");
        assert!(prompts.get(RequestId(0)).is_none() && prompts.get(RequestId(1)).is_some());
        prompts.remember(SessionId(0), RequestId(0), prompt(10));
        assert!(prompts.get(RequestId(0)).is_none(), "its session has gone on");
        for request in 6_000..12_000 {
            prompts.remember(SessionId(request), RequestId(request), prompt(10));
        }
        assert_eq!(prompts.len(), PROMPTS);
        prompts.remember(SessionId(1), RequestId(20_000), prompt(TOKENS - 15));
        assert_eq!(prompts.len(), 2, "the oldest give way");
        let held = prompts.get(RequestId(20_000)).expect("the latest is kept");
        assert!(held.history(u32::MAX).is_none() && held.history(16).is_some());
        prompts.forget_up_to(RequestId(20_000));
        assert_eq!((prompts.len(), prompts.mark()), (0, None));
        assert_eq!(
            prompts.kept().map(|kept| (kept.tokens, kept.by_session.len())),
            Some((0, 0))
        );
    }

    #[test]
    fn nothing_is_kept_where_no_errand_is_run() {
        let prompts = Prompts::new(false);
        prompts.remember(SessionId(1), RequestId(1), prompt(10));
        assert!(prompts.get(RequestId(1)).is_none() && !prompts.are_wanted());
    }
}
