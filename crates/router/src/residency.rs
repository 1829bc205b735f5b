//! What lies where: the index that KV events feed, and predictions for what events do not tell or not yet.
//!
//! The index holds only what events said. A prediction says "this worker holds so much of this session's last prompt", from
//! the moment a leg is sent there until a time to live has passed; it covers workers without events, workers with
//! a gap, and the moments until events arrive. The two are never mixed, so a prediction that expires cannot take a fact
//! with it. Predictions are bounded by count and by the size of the worker's pool, oldest first, which is about
//! what the worker's own eviction does.
//!
//! Where events do not tell, a worker's own sketches may (`sketches.rs`): they go before the index where that is older than they are, and
//! before what was predicted of a session earlier.
//!
//! A reported count of cached tokens that is clearly below what was expected corrects predictions: a prefix tree
//! loses children before parents, so whatever branches off beyond the reported length is gone too.

use crate::event::KvUpdate;
use crate::sharing::{shared_beyond, shared_blocks};
use crate::sketches::{Sketches, Told};
use homing_kv::{BlockHash, Overlap, ResidencyIndex, Tier};
use homing_units::{Duration, Instant, SessionId, WorkerId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Predictions of other families that are looked at for each worker: enough to see boilerplate there.
const RECENT_STRANGERS: usize = 4;

/// What lies where.
#[derive(Debug)]
pub(crate) struct Residency {
    pub(crate) index: ResidencyIndex,
    pub(crate) sketches: Sketches,
    predictions: BTreeMap<WorkerId, Predictions>,
    limit: usize,
}

/// What is predicted to lie at one worker.
#[derive(Debug, Default)]
struct Predictions {
    by_session: BTreeMap<SessionId, Prediction>,
    /// Oldest first.
    by_age: BTreeSet<(Instant, SessionId)>,
    blocks: usize,
    /// From then on none of them counts.
    expire: Instant,
}

/// A prefix of a session's prompt that is taken to lie at a worker.
#[derive(Clone, Debug)]
struct Prediction {
    prompt: Arc<[BlockHash]>,
    held: usize,
    made: Instant,
    expires: Instant,
}

/// A prediction to make.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Predicted<'a> {
    pub(crate) session: SessionId,
    pub(crate) prompt: &'a Arc<[BlockHash]>,
    pub(crate) ttl: Duration,
    /// The worker's pool in blocks: it holds no more.
    pub(crate) pool_blocks: usize,
}

/// How much of a prompt a worker holds, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Held {
    /// In the accelerator's memory, from the first block on, known or predicted.
    pub(crate) gpu_blocks: u32,
    /// More of it in the host's memory.
    pub(crate) host_blocks: u32,
    /// What of it is the family's own, weighted by one over the families that own it; all of it where it is
    /// predicted from a prompt of the family.
    pub(crate) exclusive_blocks: f64,
}

impl Residency {
    pub(crate) fn new(index_blocks: usize, predictions: usize) -> Self {
        Self {
            index: ResidencyIndex::new(index_blocks),
            sketches: Sketches::default(),
            predictions: BTreeMap::new(),
            limit: predictions,
        }
    }

    /// Applies a worker's KV events, in order.
    pub(crate) fn apply(&mut self, worker: WorkerId, updates: &[KvUpdate]) {
        for update in updates {
            match update {
                KvUpdate::Stored { parent, hashes, tier } => self.index.store(worker, *parent, hashes, *tier),
                KvUpdate::Removed { hashes, tier } => self.index.remove(worker, hashes, *tier),
                KvUpdate::Cleared => self.forget(worker),
            }
        }
    }

    /// What events said of this worker does not hold any more.
    pub(crate) fn clear_index(&mut self, worker: WorkerId) {
        self.index.clear_worker(worker);
    }

    /// Nothing is assumed about this worker's cache.
    pub(crate) fn forget(&mut self, worker: WorkerId) {
        self.index.clear_worker(worker);
        self.sketches.forget(worker);
        self.predictions.remove(&worker);
    }

    /// This worker will hold this prompt: a leg was sent there, or has ended there.
    pub(crate) fn predict(&mut self, now: Instant, worker: WorkerId, predicted: Predicted<'_>) {
        let predictions = self.predictions.entry(worker).or_default();
        predictions.drop_expired(now);
        let held = predicted.prompt.len().min(predicted.pool_blocks);
        let prompt = Arc::clone(predicted.prompt);
        let prediction = Prediction {
            prompt,
            held,
            made: now,
            expires: now + predicted.ttl,
        };
        predictions.insert(predicted.session, prediction);
        while predictions.by_session.len() > self.limit || predictions.blocks > predicted.pool_blocks {
            let (_, oldest) = *predictions.by_age.first().expect("what is over the bound is not empty");
            predictions.remove(oldest);
        }
    }

    /// A worker reported fewer cached blocks of this prompt than were expected: what lies beyond them is gone, except
    /// what the leg that reported has computed again.
    pub(crate) fn correct(&mut self, worker: WorkerId, prompt: &[BlockHash], reported_blocks: usize) {
        let Some(predictions) = self.predictions.get_mut(&worker) else {
            return;
        };
        let sessions: Vec<_> = predictions.by_session.keys().copied().collect();
        for session in sessions {
            let mut prediction = predictions.remove(session).expect("its key was listed above");
            let shared = shared_blocks(&prediction.prompt, prompt);
            if shared > reported_blocks {
                prediction.held = prediction.held.min(shared);
            }
            predictions.insert(session, prediction);
        }
    }

    /// Blocks of this prompt that the events of a worker with a lost part claim beyond what it reported are not believed.
    pub(crate) fn disbelieve(&mut self, worker: WorkerId, prompt: &[BlockHash], reported_blocks: usize) {
        let beyond = prompt.get(reported_blocks..).unwrap_or_default();
        self.index.remove(worker, beyond, Tier::Gpu);
    }

    /// What was predicted of a session at a worker did not come about, or not for sure.
    pub(crate) fn retract(&mut self, worker: WorkerId, session: SessionId) {
        if let Some(predictions) = self.predictions.get_mut(&worker) {
            predictions.remove(session);
        }
    }

    /// What events alone say that each worker holds of this prompt.
    pub(crate) fn known(&self, prompt: &[BlockHash], family: u64) -> BTreeMap<WorkerId, Held> {
        let known = self.index.overlap(Some(family), prompt);
        known
            .into_iter()
            .map(|(worker, overlap)| (worker, Held::from(overlap)))
            .collect()
    }

    /// What each worker holds of this prompt. `kin` are the sessions of `family`.
    pub(crate) fn held(
        &self,
        now: Instant,
        prompt: &[BlockHash],
        family: u64,
        kin: &[SessionId],
    ) -> BTreeMap<WorkerId, Held> {
        let mut held = self.held_untold(now, prompt, family, kin);
        let mut told = self.sketches.all_told(now).peekable();
        if told.peek().is_some() {
            let known = self.known(prompt, family);
            for told in told {
                let known = known.get(&told.worker()).copied().unwrap_or_default();
                let says = self.held_as_told(now, &told, known, (prompt, family, kin));
                held.insert(told.worker(), says);
            }
        }
        held
    }

    /// What one worker says itself that it holds, with what is known and predicted beside that.
    fn held_as_told(
        &self,
        now: Instant,
        told: &Told<'_>,
        known: Held,
        (prompt, family, kin): (&[BlockHash], u64, &[SessionId]),
    ) -> Held {
        let predictions = self.predictions.get(&told.worker()).filter(|all| all.expire > now);
        let says = |session: &SessionId| {
            let predicted = predictions.and_then(|all| all.by_session.get(session));
            if told.covers(*session, predicted.map(|prediction| prediction.made)) {
                return told.of_session(*session, prompt, &self.index) as usize;
            }
            predictions.map_or(0, |all| all.share(now, *session, prompt))
        };
        let named = kin.iter().any(|session| told.names(*session));
        let nameless = || told.of_nameless(prompt, &self.index) as usize;
        let own = kin.iter().map(says).max().unwrap_or(0);
        let own = own.max(if named { 0 } else { nameless() });
        let strangers = predictions
            .into_iter()
            .flat_map(|all| all.by_age.iter().rev().take(RECENT_STRANGERS));
        let any = strangers.map(|(_, session)| says(session)).fold(own, usize::max);
        let mut held = match named && !told.index_counts() {
            true => Held::default(),
            false => known,
        };
        held.add_predicted(self.index.exclusive_weight(family, &prompt[..own]), any);
        held
    }

    /// What each worker holds of this prompt by events and predictions alone.
    pub(crate) fn held_untold(
        &self,
        now: Instant,
        prompt: &[BlockHash],
        family: u64,
        kin: &[SessionId],
    ) -> BTreeMap<WorkerId, Held> {
        let mut held = self.known(prompt, family);
        let live = self
            .predictions
            .iter()
            .filter(|(_, predictions)| predictions.expire > now);
        for (worker, predictions) in live {
            let own = kin
                .iter()
                .map(|session| predictions.share(now, *session, prompt))
                .max()
                .unwrap_or(0);
            let strangers = predictions.by_age.iter().rev().take(RECENT_STRANGERS);
            let known = held.get(worker).map_or(0, |held| held.gpu_blocks as usize);
            let any = strangers.fold(own.max(known), |most, (_, session)| {
                predictions.share_beyond(now, *session, prompt, most)
            });
            if any > 0 {
                held.entry(*worker).or_default().add_predicted(own as f64, any);
            }
        }
        held
    }

    /// Predictions that are kept for a worker.
    pub(crate) fn predicted_sessions(&self, worker: WorkerId) -> usize {
        self.predictions
            .get(&worker)
            .map_or(0, |predictions| predictions.by_session.len())
    }

    pub(crate) fn check_invariants(&self) {
        self.index.check_invariants();
        self.sketches.check_invariants();
        for predictions in self.predictions.values() {
            assert!(predictions.by_session.len() <= self.limit, "predictions are bounded");
            assert_eq!(
                predictions.by_session.len(),
                predictions.by_age.len(),
                "each prediction has an age"
            );
            let expire = predictions
                .by_session
                .values()
                .map(|prediction| prediction.expires)
                .max();
            assert!(
                expire.is_none_or(|expire| expire <= predictions.expire),
                "the last of all is known"
            );
            let blocks: usize = predictions.by_session.values().map(|prediction| prediction.held).sum();
            assert_eq!(predictions.blocks, blocks, "predicted blocks add up");
        }
    }
}

impl Predictions {
    fn insert(&mut self, session: SessionId, prediction: Prediction) {
        self.remove(session);
        self.expire = self.expire.max(prediction.expires);
        self.blocks += prediction.held;
        self.by_age.insert((prediction.made, session));
        self.by_session.insert(session, prediction);
    }

    fn remove(&mut self, session: SessionId) -> Option<Prediction> {
        let prediction = self.by_session.remove(&session)?;
        self.by_age.remove(&(prediction.made, session));
        self.blocks -= prediction.held;
        Some(prediction)
    }

    /// Drops predictions whose time is over, as far as they are the oldest; the others are bounded, and count no more.
    fn drop_expired(&mut self, now: Instant) {
        while let Some((_, session)) = self.by_age.first().copied()
            && self.by_session[&session].expires <= now
        {
            self.remove(session);
        }
    }

    /// How many blocks of `prompt` lie here because of what is predicted for `session`.
    fn share(&self, now: Instant, session: SessionId, prompt: &[BlockHash]) -> usize {
        self.held_of(now, session).map_or(0, |held| shared_blocks(held, prompt))
    }

    /// The same where only more than `floor` matters; else `floor`.
    fn share_beyond(&self, now: Instant, session: SessionId, prompt: &[BlockHash], floor: usize) -> usize {
        self.held_of(now, session)
            .map_or(floor, |held| shared_beyond(held, prompt, floor))
    }

    /// What is predicted for `session`, as long as that counts.
    fn held_of(&self, now: Instant, session: SessionId) -> Option<&[BlockHash]> {
        self.by_session
            .get(&session)
            .filter(|prediction| prediction.expires > now)
            .map(|prediction| &prediction.prompt[..prediction.held])
    }
}

impl From<Overlap> for Held {
    fn from(overlap: Overlap) -> Self {
        Self {
            gpu_blocks: overlap.gpu_blocks,
            host_blocks: overlap.host_blocks,
            exclusive_blocks: overlap.exclusive_weight,
        }
    }
}

impl Held {
    /// Takes the better of what is known and what is predicted.
    fn add_predicted(&mut self, own: f64, any: usize) {
        let any = u32::try_from(any).unwrap_or(u32::MAX);
        let beyond = any.saturating_sub(self.gpu_blocks);
        self.host_blocks = self.host_blocks.saturating_sub(beyond);
        self.gpu_blocks += beyond;
        self.exclusive_blocks = self.exclusive_blocks.max(own);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const W: WorkerId = WorkerId(3);
    const POOL: usize = 100;

    fn at(seconds: u64) -> Instant {
        Instant::ZERO + Duration::from_secs(seconds)
    }

    /// A prompt of a shared head of `shared` blocks and `own` blocks of its own.
    fn prompt(own: u128, shared: u128, length: u128) -> Arc<[BlockHash]> {
        (0..length)
            .map(|index| BlockHash(if index < shared { index + 1 } else { own * 1_000 + index }))
            .collect()
    }

    fn predict(residency: &mut Residency, seconds: u64, session: u64, prompt: &Arc<[BlockHash]>) {
        let ttl = Duration::from_secs(10);
        let predicted = Predicted {
            session: SessionId(session),
            prompt,
            ttl,
            pool_blocks: POOL,
        };
        residency.predict(at(seconds), W, predicted);
        residency.check_invariants();
    }

    fn held(residency: &Residency, seconds: u64, session: u64, prompt: &[BlockHash]) -> (u32, f64) {
        let held = residency.held(at(seconds), prompt, session, &[SessionId(session)]);
        held.get(&W)
            .map_or((0, 0.0), |held| (held.gpu_blocks, held.exclusive_blocks))
    }

    #[test]
    fn a_prediction_counts_until_it_expires() {
        let mut residency = Residency::new(1_000, 8);
        let own = prompt(1, 5, 20);
        predict(&mut residency, 0, 1, &own);
        assert_eq!(held(&residency, 9, 1, &prompt(1, 5, 30)), (20, 20.0));
        assert_eq!(
            held(&residency, 9, 2, &prompt(2, 5, 30)),
            (5, 0.0),
            "boilerplate is no pull"
        );
        assert_eq!(held(&residency, 10, 1, &own), (0, 0.0));
        predict(&mut residency, 10, 2, &prompt(2, 5, 20));
        assert_eq!(residency.predicted_sessions(W), 1, "what has expired is dropped");
        residency.retract(W, SessionId(2));
        assert_eq!(residency.predicted_sessions(W), 0);
    }

    #[test]
    fn predictions_are_bounded_by_the_pool_and_by_count() {
        let mut residency = Residency::new(1_000, 3);
        for session in 0..4 {
            predict(&mut residency, session, session, &prompt(u128::from(session), 0, 30));
        }
        assert_eq!(residency.predicted_sessions(W), 3);
        predict(&mut residency, 5, 9, &prompt(9, 0, 90));
        assert_eq!(residency.predicted_sessions(W), 1, "the pool holds no more");
        predict(&mut residency, 6, 9, &prompt(9, 0, 190));
        assert_eq!(held(&residency, 6, 9, &prompt(9, 0, 190)).0, 100);
    }

    #[test]
    fn a_report_below_the_prediction_drops_what_branches_off_beyond() {
        let mut residency = Residency::new(1_000, 8);
        let (near, far) = (prompt(1, 5, 20), prompt(2, 10, 20));
        predict(&mut residency, 0, 1, &near);
        predict(&mut residency, 0, 2, &far);
        // Shares 5 blocks with the one and 10 with the other; 7 were found.
        residency.correct(W, &prompt(3, 10, 40), 7);
        residency.check_invariants();
        assert_eq!(held(&residency, 1, 1, &near).0, 20);
        assert_eq!(held(&residency, 1, 2, &far).0, 10);
    }

    #[test]
    fn events_and_predictions_do_not_mix() {
        let mut residency = Residency::new(1_000, 8);
        let own = prompt(1, 0, 20);
        let stored = KvUpdate::Stored {
            parent: None,
            hashes: own[..8].to_vec(),
            tier: Tier::Gpu,
        };
        residency.apply(W, &[stored]);
        predict(&mut residency, 0, 1, &own);
        assert_eq!(held(&residency, 60, 1, &own).0, 8, "the fact outlives the prediction");
        residency.disbelieve(W, &own, 3);
        assert_eq!(held(&residency, 60, 1, &own).0, 3);
        residency.apply(W, &[KvUpdate::Cleared]);
        assert_eq!(held(&residency, 60, 1, &own).0, 0);
    }
}
