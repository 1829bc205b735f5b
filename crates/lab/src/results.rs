//! Runs every setup once for each seed, on a few threads, and keeps what was observed in a fixed order.
//!
//! A simulation is one thread's work; which thread takes which run does not show, since each result goes to its own place.

use crate::observe::Observed;
use crate::setup::{Setup, SetupError};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// What was observed of all setups: everything, or what a caller keeps of a run.
#[derive(Debug)]
pub struct Results<T = Observed> {
    runs: BTreeMap<Setup, Vec<T>>,
}

/// A setup that could not be run.
#[derive(Debug, thiserror::Error)]
#[error("seed `{seed}` of `{command}`: {error}")]
pub struct RunError {
    /// The command that repeats it.
    pub command: String,
    /// The seed.
    pub seed: u64,
    /// Why.
    #[source]
    pub error: Box<SetupError>,
}

type Slot<T> = Mutex<Option<Result<T, SetupError>>>;

impl Results {
    /// Runs all `setups` on so many threads and keeps all of it. `progress` is told how many runs of how many have ended.
    ///
    /// # Errors
    /// The first setup, in order, that cannot be run.
    pub fn run(
        setups: impl IntoIterator<Item = Setup>,
        threads: usize,
        progress: impl Fn(usize, usize) + Sync,
    ) -> Result<Self, RunError> {
        Self::run_with(setups, threads, progress, Observed::simulate)
    }
}

impl<T: Send> Results<T> {
    /// The same with another way to simulate a seed of a setup, which says what is kept.
    ///
    /// # Errors
    /// The first setup, in order, that cannot be run.
    pub fn run_with(
        setups: impl IntoIterator<Item = Setup>,
        threads: usize,
        progress: impl Fn(usize, usize) + Sync,
        simulate: impl Fn(&Setup, u64) -> Result<T, SetupError> + Sync,
    ) -> Result<Self, RunError> {
        let jobs: Vec<(Setup, u64)> = merged(setups)
            .into_iter()
            .flat_map(|setup| (1..=setup.seeds).map(move |seed| (setup.clone(), seed)))
            .collect();
        let slots: Vec<Slot<T>> = jobs.iter().map(|_| Mutex::new(None)).collect();
        let (next, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..threads.max(1) {
                scope.spawn(|| {
                    while let Some((index, (setup, seed))) = take(&next, &jobs) {
                        let observed = simulate(setup, *seed);
                        *slots[index].lock().expect("no run panics while it holds a place") = Some(observed);
                        progress(ended.fetch_add(1, Ordering::Relaxed) + 1, jobs.len());
                    }
                });
            }
        });
        let mut results = Self { runs: BTreeMap::new() };
        for ((setup, seed), slot) in jobs.into_iter().zip(slots) {
            let ran = slot.into_inner().expect("no run panics while it holds a place");
            let observed = ran
                .expect("every run was taken by some thread")
                .map_err(|error| RunError {
                    command: setup.command(),
                    seed,
                    error: Box::new(error),
                })?;
            results.runs.entry(without_seeds(setup)).or_default().push(observed);
        }
        Ok(results)
    }

    /// The runs of a setup, by seed; as many as it says.
    ///
    /// # Panics
    /// If it was not run: an experiment evaluates the setups that it declares.
    #[must_use]
    pub fn of(&self, setup: &Setup) -> &[T] {
        &self.all(setup)[..setup.seeds as usize]
    }

    /// All runs of a setup, by seed, however many it asks for.
    ///
    /// # Panics
    /// If it was not run.
    #[must_use]
    pub fn all(&self, setup: &Setup) -> &[T] {
        let runs = self.runs.get(&without_seeds(setup.clone()));
        runs.unwrap_or_else(|| panic!("`{}` was declared by its experiment", setup.command()))
    }

    /// These and those; of a setup that both have, those of the one with more runs.
    #[must_use]
    pub fn and(mut self, others: Self) -> Self {
        for (setup, runs) in others.runs {
            let known = self.runs.entry(setup).or_default();
            if runs.len() > known.len() {
                *known = runs;
            }
        }
        self
    }
}

/// The setups without doubles: of those that differ in the number of seeds only the longest.
fn merged(setups: impl IntoIterator<Item = Setup>) -> Vec<Setup> {
    let mut longest: BTreeMap<Setup, u64> = BTreeMap::new();
    for setup in setups {
        let seeds = setup.seeds;
        let known = longest.entry(without_seeds(setup)).or_default();
        *known = seeds.max(*known);
    }
    longest.into_iter().map(|(setup, seeds)| setup.seeds(seeds)).collect()
}

fn without_seeds(setup: Setup) -> Setup {
    setup.seeds(0)
}

fn take<'a, T>(next: &AtomicUsize, jobs: &'a [T]) -> Option<(usize, &'a T)> {
    let index = next.fetch_add(1, Ordering::Relaxed);
    jobs.get(index).map(|job| (index, job))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small(policy: &str) -> Setup {
        Setup::new("gen:swe52:sessions=3:seed=1", "h100x8-dp", policy)
    }

    #[test]
    fn threads_do_not_show_in_the_results() {
        let setups = || [small("round-robin"), small("dp-cache-aware").seeds(2)];
        let requests = |threads: usize| {
            let results = Results::run(setups(), threads, |_, _| {}).expect("good setups");
            setups().map(|setup| {
                results
                    .of(&setup)
                    .iter()
                    .map(|run| run.record.clone())
                    .collect::<Vec<_>>()
            })
        };
        assert_eq!(requests(1), requests(3));
    }

    #[test]
    fn setups_share_their_runs() {
        let setups = merged([small("sticky").seeds(2), small("sticky").seeds(5), small("sticky")]);
        assert_eq!(setups, [small("sticky").seeds(5)]);
        let results = Results::run(setups, 2, |_, _| {}).expect("a good setup");
        let seeds = |setup: &Setup| results.of(setup).iter().map(|run| run.record.seed).collect::<Vec<_>>();
        assert_eq!(seeds(&small("sticky")), [1, 2, 3]);
    }

    #[test]
    fn a_wrong_setup_is_named() {
        let error = Results::run([small("nobody")], 1, |_, _| {}).expect_err("no such policy");
        assert!(error.to_string().contains("--policy nobody"), "{error}");
    }
}
