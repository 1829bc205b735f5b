//! What is known of each worker apart from its cache: who it is, whether it lives, how busy it says it is.
//!
//! Life and load are kept apart on purpose. Only probes and broken connections speak about life; a busy answer, a slow
//! transfer or a full queue never does. Nothing is booked here: what the router itself sent where is in the ledger.

use crate::action::WorkerState;
use crate::event::{HealthReport, LoadReport, WorkerInfo};
use crate::feed::Feed;
use crate::learning::{Likeness, StepFit, Work};
use crate::room::Room;
use crate::router::Prefilled;
use crate::speed::Speed;
use homing_units::{BootEpoch, Duration, Instant, WorkerId};
use std::collections::{BTreeMap, VecDeque};

/// Earlier lives of a worker that are remembered, to know a late message of one from the first of a new one.
const PAST_EPOCHS: usize = 8;

/// The weight of the newest time to first token in the running mean is one over this.
const TTFT_MEMORY: f64 = 8.0;

/// All workers, by id.
#[derive(Debug)]
pub(crate) struct Fleet {
    workers: BTreeMap<WorkerId, Worker>,
    /// How fast its workers are as a rule: what is thought of one that has not shown it yet. Without this, whoever has served
    /// nothing looks like the built-in hardware, and on slower hardware every turn would be drawn there.
    usual: StepFit,
}

impl Default for Fleet {
    fn default() -> Self {
        Self {
            workers: BTreeMap::new(),
            usual: StepFit::new(Speed::default()),
        }
    }
}

/// A worker.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) info: WorkerInfo,
    pub(crate) feed: Feed,
    /// Its own figures, and when they came.
    pub(crate) load: Option<(Instant, LoadReport)>,
    /// What it said of its room, where it can be asked.
    pub(crate) room: Option<Room>,
    /// It said that it is busy: no new work before this.
    pub(crate) busy_until: Instant,
    /// The pause that led to `busy_until`.
    pub(crate) busy_pause: Duration,
    pub(crate) cache: CacheCounters,
    /// What its sketches were worth.
    pub(crate) sketched: SketchCounters,
    /// Decode legs that it was ever given.
    pub(crate) assigned_requests: u64,
    /// Running mean of the time to first token of what it decoded, in seconds.
    pub(crate) recent_ttft_s: Option<f64>,
    /// How fast it is, as far as it has shown: see [`Fleet::speed`].
    pub(crate) steps: StepFit,
    /// Whether it has shown that it is not like the others.
    likeness: Likeness,
    /// Prefill that it was ever sent.
    pub(crate) prefilled: Prefilled,
    /// Since when it has been at work on the first of the prefill that is pending there, where there is any.
    pub(crate) prefilling_since: Instant,
    liveness: Liveness,
    missed_probes: u32,
    /// It was suspect or dead and has answered no leg since.
    on_trial: bool,
    past_epochs: VecDeque<BootEpoch>,
    announced: Option<WorkerState>,
    /// When that was.
    pub(crate) announced_at: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Liveness {
    Alive,
    Suspect,
    Dead,
}

/// Cached prompt tokens as the router expected them and as the worker reported them, of legs where it reported any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CacheCounters {
    pub(crate) legs: u64,
    pub(crate) predicted_tokens: u64,
    pub(crate) reported_tokens: u64,
    /// Sum of the differences, whichever way.
    pub(crate) error_tokens: u64,
}

/// What a worker's sketches were worth, over the decode legs that were placed there on what they said and reported cached tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SketchCounters {
    pub(crate) legs: u64,
    /// Legs of which they said more than events and predictions did.
    pub(crate) raised: u64,
    /// Legs of which they said less.
    pub(crate) lowered: u64,
    /// Sum of the differences between what they said and what was reported, whichever way.
    pub(crate) error_tokens: u64,
    /// The same of what events and predictions alone said.
    pub(crate) error_tokens_without: u64,
}

/// What an epoch says about a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    /// The life that is known.
    Same,
    /// A new life: nothing of the old one holds.
    New,
    /// A life that is over: the message is late.
    Past,
}

/// What a probe has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Probe {
    /// Nothing that the rest of the router need act on.
    Noted,
    /// It came back from the dead.
    Revived,
    /// It died of this one.
    Died,
}

impl Fleet {
    pub(crate) fn get(&self, id: WorkerId) -> Option<&Worker> {
        self.workers.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: WorkerId) -> Option<&mut Worker> {
        self.workers.get_mut(&id)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Worker> {
        self.workers.values()
    }

    /// The worker is known by this from now on, and by nothing that was known before but what was announced.
    pub(crate) fn join(&mut self, info: WorkerInfo) {
        let id = info.id;
        let (announced, announced_at) = self
            .get(id)
            .map_or((None, Instant::ZERO), |worker| (worker.announced, worker.announced_at));
        self.workers.insert(
            id,
            Worker {
                announced,
                announced_at,
                ..Worker::new(info)
            },
        );
    }

    /// How fast a worker is, as far as that is known.
    pub(crate) fn speed(&self, worker: &Worker) -> Speed {
        if worker.likeness.is_unlike() {
            worker.steps.speed()
        } else {
            self.usual.speed()
        }
    }

    /// So much work took a worker so many seconds.
    pub(crate) fn learn(&mut self, id: WorkerId, work: &Work, seconds: f64) {
        let Some(worker) = self.workers.get_mut(&id) else {
            return;
        };
        if worker.steps.seen() == 0 {
            worker.steps = StepFit::like(&self.usual);
        }
        let errors = worker.steps.error(work, seconds).zip(self.usual.error(work, seconds));
        if let Some((own, fellows)) = errors {
            worker.likeness.learn(own, fellows);
        }
        worker.steps.learn(work, seconds);
        self.usual.learn(work, seconds);
    }

    pub(crate) fn leave(&mut self, id: WorkerId) -> bool {
        self.workers.remove(&id).is_some()
    }

    /// Whether one of these workers takes and decodes so many tokens; mostly the first that is looked at.
    pub(crate) fn any_decodes(&self, tokens: u64, of: impl Fn(&Worker) -> bool) -> bool {
        self.iter()
            .any(|worker| worker.info.role.decodes() && tokens <= u64::from(worker.context_limit()) && of(worker))
    }

    /// The longest prompt and output that one of these workers takes and decodes, in tokens.
    pub(crate) fn longest_context(&self, of: impl Fn(&Worker) -> bool) -> Option<u32> {
        let decoders = self.iter().filter(|worker| worker.info.role.decodes() && of(worker));
        decoders.map(Worker::context_limit).max()
    }
}

impl Worker {
    fn new(info: WorkerInfo) -> Self {
        Self {
            info,
            feed: Feed::default(),
            load: None,
            room: None,
            busy_until: Instant::ZERO,
            busy_pause: Duration::ZERO,
            cache: CacheCounters::default(),
            sketched: SketchCounters::default(),
            assigned_requests: 0,
            recent_ttft_s: None,
            steps: StepFit::new(Speed::default()),
            likeness: Likeness::default(),
            prefilled: Prefilled::default(),
            prefilling_since: Instant::ZERO,
            liveness: Liveness::Alive,
            missed_probes: 0,
            on_trial: false,
            past_epochs: VecDeque::new(),
            announced: None,
            announced_at: Instant::ZERO,
        }
    }

    /// Whether its events have told all that is in its cache.
    pub(crate) fn tells_exactly(&self) -> bool {
        self.info.kv_events && self.feed.is_exact()
    }

    pub(crate) fn state(&self) -> WorkerState {
        match self.liveness {
            Liveness::Alive if self.tells_exactly() => WorkerState::Exact,
            Liveness::Alive => WorkerState::Degraded,
            Liveness::Suspect => WorkerState::Suspect,
            Liveness::Dead => WorkerState::Dead,
        }
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.liveness == Liveness::Alive
    }

    pub(crate) const fn is_on_trial(&self) -> bool {
        self.on_trial
    }

    /// Whether it can serve a turn that no other worker helps with.
    pub(crate) const fn serves_alone(&self) -> bool {
        self.info.role.decodes() && self.info.abilities.prefills_alone
    }

    /// Whether it can prefill a turn for another.
    pub(crate) const fn aids(&self) -> bool {
        self.info.role.prefills() && self.info.transfers
    }

    /// The longest prompt and output that fits its context and its pool, in tokens.
    pub(crate) fn context_limit(&self) -> u32 {
        let pool = u32::try_from(self.info.kv_tokens).unwrap_or(u32::MAX);
        self.info.max_context_tokens.min(pool)
    }

    /// Its state, where that was not announced yet.
    pub(crate) fn announce(&mut self, now: Instant) -> Option<WorkerState> {
        let state = self.state();
        if self.announced.replace(state) == Some(state) {
            return None;
        }
        self.announced_at = now;
        Some(state)
    }

    /// Places the epoch of a message among the worker's lives, and begins the new life if it is one.
    pub(crate) fn meet(&mut self, epoch: BootEpoch) -> Life {
        let unknown = BootEpoch::default();
        if epoch == self.info.epoch || epoch == unknown {
            return Life::Same;
        }
        if self.past_epochs.contains(&epoch) {
            return Life::Past;
        }
        let old = std::mem::replace(&mut self.info.epoch, epoch);
        if old == unknown {
            return Life::Same;
        }
        if self.past_epochs.len() == PAST_EPOCHS {
            self.past_epochs.pop_front();
        }
        self.past_epochs.push_back(old);
        self.feed = Feed::default();
        self.load = None;
        self.room = None;
        self.busy_until = Instant::ZERO;
        Life::New
    }

    /// A connection could not be made or broke.
    pub(crate) fn doubt(&mut self) {
        if self.liveness == Liveness::Alive {
            self.liveness = Liveness::Suspect;
        }
    }

    /// A leg was answered: it does work.
    pub(crate) fn trust(&mut self) {
        self.on_trial = false;
        self.busy_pause = Duration::ZERO;
    }

    /// A request that it decodes had its first token after so many seconds.
    pub(crate) fn learn_ttft(&mut self, seconds: f64) {
        let mean = self.recent_ttft_s.unwrap_or(seconds);
        self.recent_ttft_s = Some(mean + (seconds - mean) / TTFT_MEMORY);
    }

    /// A liveness probe was answered or missed. The report's epoch is for [`Worker::meet`].
    pub(crate) fn probed(&mut self, report: HealthReport, missed_probes: u32) -> Probe {
        let before = self.liveness;
        if report.alive {
            self.missed_probes = 0;
            self.liveness = Liveness::Alive;
            self.on_trial |= before != Liveness::Alive;
            return if before == Liveness::Dead {
                Probe::Revived
            } else {
                Probe::Noted
            };
        }
        self.missed_probes = self.missed_probes.saturating_add(1);
        self.liveness = if self.missed_probes >= missed_probes {
            Liveness::Dead
        } else {
            Liveness::Suspect
        };
        // A worker that is taken for dead stays so until it answers.
        if before == Liveness::Dead {
            self.liveness = Liveness::Dead;
        }
        if self.liveness == Liveness::Dead && before != Liveness::Dead {
            Probe::Died
        } else {
            Probe::Noted
        }
    }
}

impl SketchCounters {
    pub(crate) fn count(&mut self, without: u32, predicted: u32, reported: u32) {
        self.legs += 1;
        self.raised += u64::from(predicted > without);
        self.lowered += u64::from(predicted < without);
        self.error_tokens += u64::from(predicted.abs_diff(reported));
        self.error_tokens_without += u64::from(without.abs_diff(reported));
    }
}

impl CacheCounters {
    pub(crate) fn count(&mut self, predicted: u32, reported: u32) {
        self.legs += 1;
        self.predicted_tokens += u64::from(predicted);
        self.reported_tokens += u64::from(reported);
        self.error_tokens += u64::from(predicted.abs_diff(reported));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Abilities, Role};

    fn worker(epoch: u64) -> Worker {
        Worker::new(WorkerInfo {
            id: WorkerId(0),
            name: "d0".into(),
            role: Role::Both,
            epoch: BootEpoch(epoch),
            kv_tokens: 1_000,
            max_context_tokens: 2_000,
            transfers: true,
            kv_events: true,
            abilities: Abilities::default(),
        })
    }

    fn probe(worker: &mut Worker, alive: bool) -> (Probe, WorkerState) {
        let probe = worker.probed(
            HealthReport {
                worker: WorkerId(0),
                epoch: None,
                alive,
            },
            3,
        );
        (probe, worker.state())
    }

    #[test]
    fn missed_probes_make_it_suspect_then_dead_and_an_answer_brings_it_back_on_trial() {
        let mut worker = worker(1);
        assert_eq!(probe(&mut worker, true), (Probe::Noted, WorkerState::Exact));
        assert!(!worker.is_on_trial());
        assert_eq!(probe(&mut worker, false), (Probe::Noted, WorkerState::Suspect));
        assert_eq!(probe(&mut worker, false), (Probe::Noted, WorkerState::Suspect));
        assert_eq!(probe(&mut worker, false), (Probe::Died, WorkerState::Dead));
        worker.doubt();
        assert_eq!(probe(&mut worker, false), (Probe::Noted, WorkerState::Dead));
        assert_eq!(probe(&mut worker, true), (Probe::Revived, WorkerState::Exact));
        assert!(worker.is_on_trial());
        worker.trust();
        worker.doubt();
        assert_eq!(worker.state(), WorkerState::Suspect);
        assert_eq!(probe(&mut worker, true), (Probe::Noted, WorkerState::Exact));
        assert!(worker.is_on_trial());
    }

    #[test]
    fn a_late_message_of_an_old_life_is_no_new_life() {
        let mut worker = worker(0);
        assert_eq!(worker.meet(BootEpoch(5)), Life::Same, "the first epoch is learnt");
        assert_eq!(worker.meet(BootEpoch(0)), Life::Same, "no epoch says nothing");
        assert_eq!(worker.meet(BootEpoch(3)), Life::New, "epochs need not grow");
        assert_eq!(worker.meet(BootEpoch(5)), Life::Past);
        assert_eq!(worker.meet(BootEpoch(3)), Life::Same);
    }

    #[test]
    fn a_state_is_announced_once() {
        let mut worker = worker(1);
        let at = Instant::from_nanos;
        assert_eq!(worker.announce(at(1)), Some(WorkerState::Exact));
        assert_eq!((worker.announce(at(2)), worker.announced_at), (None, at(1)));
        worker.doubt();
        assert_eq!(worker.announce(at(3)), Some(WorkerState::Suspect));
        assert_eq!(worker.announced_at, at(3));
    }

    #[test]
    fn the_context_is_bounded_by_the_pool() {
        assert_eq!(worker(1).context_limit(), 1_000);
    }
}
