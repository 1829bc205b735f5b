//! What workers' own sketches say is resident, where their KV events do not: a gap that no replay filled, one that is being filled, events
//! that a worker does not send, a router that has been restarted.
//!
//! A report is the truth of one moment: the worker's life and its KV events up to a number (`sequence`). What came later goes before it:
//!
//! - What events of that number and later have removed is gone, and what they have stored is there. Blocks that are removed
//!   are noted for as long as a worker is asked, so that a report may come after events that are later than it.
//! - A report from before the first event that was noted is not taken: what has been removed since would come back.
//! - Where the report is later than all that the index was told, the index is out of date and does not count for sessions
//!   that the report names.
//! - A prediction that was made later than the report counts, one that was made before does not.
//!
//! Nothing of a worker whose index is exact is kept. The report of another life than the known one is not taken, nor one that says less
//! than the last one (an earlier one that was late). Reports count for [`FRESH_FOR`].
//!
//! Sessions are named by the router's own ids; those of another router, or of an earlier life of this one, have none. Such a sketch
//! is a session's if its prompt has the same block where the other's last prompt ended (`tip`).

use crate::event::{KvUpdate, SessionSketch, SketchReport};
use homing_kv::{BlockHash, Known, ResidencyIndex, Tier};
use homing_units::{Duration, Instant, SessionId, WorkerId};
use std::collections::BTreeMap;

/// A report counts for so long: ten of the gateway's polls.
pub(crate) const FRESH_FOR: Duration = Duration::from_secs(10);

/// Sketches of one report that are kept, the first ones.
pub(crate) const SKETCHES_MAX: usize = 1_024;

/// Removed blocks that are noted for one worker; with more of them its report is dropped.
const GONE_MAX: usize = 16_384;

/// What workers have said.
#[derive(Debug, Default)]
pub(crate) struct Sketches {
    workers: BTreeMap<WorkerId, Asked>,
}

/// A worker that is asked for sketches.
#[derive(Debug)]
struct Asked {
    /// What events of this number and later removed is in `gone`.
    since: u64,
    /// Blocks that were removed from the accelerator's memory and not stored again, with the number of the batch that said so.
    gone: BTreeMap<BlockHash, u64>,
    report: Option<Report>,
    /// The number of the batch that the index waits for.
    next: u64,
}

/// A worker's last report.
#[derive(Debug)]
struct Report {
    /// What it says was so then.
    at: Instant,
    sequence: u64,
    named: BTreeMap<SessionId, SessionSketch>,
    nameless: Vec<SessionSketch>,
}

/// A report that counts, and what came since.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Told<'a> {
    worker: WorkerId,
    report: &'a Report,
    gone: &'a BTreeMap<BlockHash, u64>,
    /// Whether the index was told as much as the report or more.
    index_counts: bool,
}

impl Sketches {
    /// Takes a report in of a worker whose index is not exact and waits for the events of number `next`.
    pub(crate) fn take(&mut self, now: Instant, next: u64, report: SketchReport) {
        let asked = self.workers.entry(report.worker).or_insert_with(|| Asked {
            since: next,
            gone: BTreeMap::new(),
            report: None,
            next,
        });
        let late = |last: &Report| report.sequence < last.sequence;
        if report.sequence < asked.since || asked.report.as_ref().is_some_and(late) {
            return;
        }
        asked.gone.retain(|_, number| *number >= report.sequence);
        let (mut named, mut nameless) = (BTreeMap::new(), Vec::new());
        for sketch in report.sketches.into_iter().take(SKETCHES_MAX) {
            match sketch.session {
                Some(session) => drop(named.insert(session, sketch)),
                None => nameless.push(sketch),
            }
        }
        asked.report = Some(Report {
            at: Instant::ZERO + now.saturating_since(Instant::ZERO + report.age.min(FRESH_FOR)),
            sequence: report.sequence,
            named,
            nameless,
        });
    }

    /// A batch of a worker's events was applied.
    pub(crate) fn applied(&mut self, worker: WorkerId, number: u64, updates: &[KvUpdate]) {
        let Some(asked) = self.workers.get_mut(&worker) else {
            return;
        };
        for update in updates {
            match update {
                KvUpdate::Removed {
                    hashes,
                    tier: Tier::Gpu,
                } => {
                    asked.gone.extend(hashes.iter().map(|hash| (*hash, number)));
                }
                KvUpdate::Stored {
                    hashes,
                    tier: Tier::Gpu,
                    ..
                } => {
                    for hash in hashes {
                        asked.gone.remove(hash);
                    }
                }
                KvUpdate::Removed { tier: Tier::Host, .. } | KvUpdate::Stored { tier: Tier::Host, .. } => {}
                // The driver forgets all that is known of the worker.
                KvUpdate::Cleared => {}
            }
        }
        if asked.gone.len() > GONE_MAX {
            asked.gone.clear();
            asked.report = None;
            asked.since = number + 1;
        }
    }

    /// A worker's index waits for this batch now.
    pub(crate) fn waits_for(&mut self, worker: WorkerId, next: u64) {
        if let Some(asked) = self.workers.get_mut(&worker) {
            asked.next = next;
        }
    }

    /// Nothing that a worker said counts any more.
    pub(crate) fn forget(&mut self, worker: WorkerId) {
        self.workers.remove(&worker);
    }

    /// What a worker said of a session was wrong.
    pub(crate) fn disbelieve(&mut self, worker: WorkerId, session: SessionId) {
        let report = self.workers.get_mut(&worker).and_then(|asked| asked.report.as_mut());
        if let Some(report) = report {
            report.named.remove(&session);
        }
    }

    /// What a worker's report says, if it counts now.
    pub(crate) fn told(&self, now: Instant, worker: WorkerId) -> Option<Told<'_>> {
        let asked = self.workers.get(&worker)?;
        let report = asked.report.as_ref().filter(|report| now < report.at + FRESH_FOR)?;
        Some(Told {
            worker,
            report,
            gone: &asked.gone,
            index_counts: asked.next >= report.sequence,
        })
    }

    /// Sessions of which a worker has told something that is kept.
    pub(crate) fn sessions(&self, worker: WorkerId) -> usize {
        let report = self.workers.get(&worker).and_then(|asked| asked.report.as_ref());
        report.map_or(0, |report| report.named.len() + report.nameless.len())
    }

    /// All that workers say now.
    pub(crate) fn all_told(&self, now: Instant) -> impl Iterator<Item = Told<'_>> {
        self.workers.keys().filter_map(move |worker| self.told(now, *worker))
    }

    pub(crate) fn check_invariants(&self) {
        for asked in self.workers.values() {
            assert!(
                asked.gone.len() <= GONE_MAX,
                "what is noted of removed blocks is bounded"
            );
            let Some(report) = &asked.report else { continue };
            assert!(
                report.sequence >= asked.since,
                "what was removed after a report is known"
            );
            assert!(
                report.named.len() + report.nameless.len() <= SKETCHES_MAX,
                "sketches are bounded"
            );
            assert!(
                asked.gone.values().all(|number| *number >= asked.since),
                "what is noted is in order"
            );
        }
    }
}

impl Told<'_> {
    /// Whose report it is.
    pub(crate) const fn worker(&self) -> WorkerId {
        self.worker
    }

    /// Whether it names this session.
    pub(crate) fn names(&self, session: SessionId) -> bool {
        self.report.named.contains_key(&session)
    }

    /// Whether it says something of this session that is later than what was predicted then.
    pub(crate) fn covers(&self, session: SessionId, predicted: Option<Instant>) -> bool {
        self.names(session) && predicted.is_none_or(|made| made <= self.report.at)
    }

    /// Whether what the index holds of this worker is as late as the report.
    pub(crate) const fn index_counts(&self) -> bool {
        self.index_counts
    }

    /// How many blocks of a prompt of this session, from the first on, are there.
    pub(crate) fn of_session(&self, session: SessionId, prompt: &[BlockHash], index: &ResidencyIndex) -> u32 {
        let sketch = self.report.named.get(&session);
        sketch.map_or(0, |sketch| self.walk(sketch, prompt, index))
    }

    /// The same by the sketches without names that this prompt goes on with.
    pub(crate) fn of_nameless(&self, prompt: &[BlockHash], index: &ResidencyIndex) -> u32 {
        let goes_on = |sketch: &&SessionSketch| {
            let last = sketch
                .tip_blocks
                .checked_sub(1)
                .and_then(|last| prompt.get(last as usize));
            last.is_some_and(|hash| hash.wire() == sketch.tip)
        };
        let nameless = self.report.nameless.iter().filter(goes_on);
        nameless
            .map(|sketch| self.walk(sketch, prompt, index))
            .max()
            .unwrap_or(0)
    }

    fn walk(&self, sketch: &SessionSketch, prompt: &[BlockHash], index: &ResidencyIndex) -> u32 {
        let indexed = self.index_counts && index.worker_blocks(self.worker).gpu > 0;
        sketch.sketch.prefix_with(prompt, |hash| {
            if self
                .gone
                .get(&hash)
                .is_some_and(|number| *number >= self.report.sequence)
            {
                Known::Gone
            } else if indexed && index.holds(self.worker, hash, Tier::Gpu) {
                Known::Held
            } else {
                Known::Nothing
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_kv::{Sketch, hash_blocks};
    use homing_units::{BootEpoch, rng_for};
    use rand::Rng as _;

    const WORKER: WorkerId = WorkerId(1);
    const SESSION: SessionId = SessionId(1);

    fn chain() -> Vec<BlockHash> {
        hash_blocks(&(0..60).collect::<Vec<u32>>(), 1)
    }

    fn report(sequence: u64, resident: &[BlockHash]) -> SketchReport {
        SketchReport {
            worker: WORKER,
            epoch: BootEpoch(1),
            sequence,
            age: Duration::ZERO,
            sketches: vec![SessionSketch {
                session: Some(SESSION),
                tip_blocks: 0,
                tip: 0,
                sketch: Sketch::of(resident).unwrap(),
            }],
        }
    }

    /// A worker whose events before number 5 are lost for good. It stores and removes the end of a session's chain; its events and its
    /// reports arrive in order each, but either may be late. Then a report with the events since is what the worker holds as of
    /// the last event, or of the report where that is later: against a list of what it held after each batch.
    #[test]
    fn a_report_and_the_events_since_are_what_the_worker_holds() {
        let (mut compared, mut too_long, mut counted) = (0, 0, 0);
        for seed in 0..200 {
            let mut rng = rng_for(seed, "sketches");
            let mut below = |bound: u64| usize::try_from(rng.next_u64() % bound).unwrap();
            let chain = chain();
            let (mut held, mut batches, mut reports) = (vec![30], Vec::new(), Vec::new());
            for _ in 0..60 {
                let (before, after) = (*held.last().unwrap(), below(chain.len() as u64 + 1));
                let update = match after >= before {
                    true => KvUpdate::Stored {
                        parent: before.checked_sub(1).map(|last| chain[last]),
                        hashes: chain[before..after].to_vec(),
                        tier: Tier::Gpu,
                    },
                    false => KvUpdate::Removed {
                        hashes: chain[after..before].to_vec(),
                        tier: Tier::Gpu,
                    },
                };
                batches.push(update);
                held.push(after);
            }
            let (mut index, mut sketches) = (ResidencyIndex::new(1_000), Sketches::default());
            let (mut next, mut now) = (5, Instant::ZERO);
            while next < batches.len() {
                now += Duration::from_millis(10);
                if below(3) == 0 {
                    // Late by some events, or early.
                    reports.push((next + 4).saturating_sub(below(8)).min(batches.len()));
                    reports.sort_unstable();
                    let sequence = reports[reports.len() - 1];
                    let told = report(sequence as u64, &chain[..held[sequence]]);
                    sketches.take(now, next as u64, told);
                } else {
                    let updates = std::slice::from_ref(&batches[next]);
                    match &updates[0] {
                        KvUpdate::Stored { parent, hashes, tier } => index.store(WORKER, *parent, hashes, *tier),
                        KvUpdate::Removed { hashes, tier } => index.remove(WORKER, hashes, *tier),
                        KvUpdate::Cleared => unreachable!("it is not drawn"),
                    }
                    sketches.applied(WORKER, next as u64, updates);
                    next += 1;
                    sketches.waits_for(WORKER, next as u64);
                }
                sketches.check_invariants();
                let Some(told) = sketches.told(now, WORKER) else {
                    continue;
                };
                let as_of = next.max(usize::try_from(told.report.sequence).unwrap());
                let says = told.of_session(SESSION, &chain, &index) as usize;
                assert!(says >= held[as_of], "seed {seed}: {says} of {} at {as_of}", held[as_of]);
                compared += 1;
                too_long += u32::from(says > held[as_of]);
                counted += u32::from(told.index_counts());
            }
        }
        assert!(
            compared > 5_000 && counted > 2_000,
            "{compared} compared, {counted} with the index"
        );
        assert!(
            too_long * 100 <= compared,
            "{too_long} of {compared} are too long by false positives"
        );
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let chain = chain();
        let mut sketches = Sketches::default();
        let mut told = report(3, &chain);
        let one = told.sketches[0].clone();
        told.sketches = (0..2 * SKETCHES_MAX as u64)
            .map(|session| SessionSketch {
                session: Some(SessionId(session)),
                ..one.clone()
            })
            .collect();
        sketches.take(Instant::ZERO, 3, told);
        assert_eq!(sketches.sessions(WORKER), SKETCHES_MAX);
        sketches.check_invariants();
        // With more removed blocks than are noted, what was said before does not count any more.
        let removed = |first: usize, count: usize| KvUpdate::Removed {
            hashes: (first..first + count).map(|index| BlockHash(index as u128)).collect(),
            tier: Tier::Gpu,
        };
        sketches.applied(WORKER, 3, &[removed(0, GONE_MAX)]);
        assert!(sketches.told(Instant::ZERO, WORKER).is_some());
        sketches.applied(WORKER, 4, &[removed(GONE_MAX, 1)]);
        assert!(sketches.told(Instant::ZERO, WORKER).is_none());
        sketches.take(Instant::ZERO, 5, report(4, &chain));
        assert!(
            sketches.told(Instant::ZERO, WORKER).is_none(),
            "what was removed by batch 4 is not known"
        );
        sketches.take(Instant::ZERO, 5, report(5, &chain));
        assert!(sketches.told(Instant::ZERO, WORKER).is_some());
        sketches.check_invariants();
        sketches.forget(WORKER);
        assert_eq!(sketches.sessions(WORKER), 0);
    }
}
