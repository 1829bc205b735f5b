//! Many seeds of chaos: `homing-chaos SEEDS [FIRST]`, as `cargo xtask chaos` runs it. A binary and no example, so that building
//! it takes none of the tests' dependencies.
//!
//! Each seed is an experiment of its own (`homing_sim::chaos`), spread over all cores. Prints what was seen and, of
//! experiments that broke, the first few by seed with their cut-down schedules; then the exit code is 1. What is printed on
//! stdout is a function of the seeds; how long it took goes to stderr.

#![expect(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "it spreads work over threads and says how long it took"
)]

use homing_sim::chaos::{Failure, Scenario};
use std::collections::BTreeMap;
use std::error::Error;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Failures that are cut down and printed; more are counted.
const SHOWN: usize = 8;

/// What the experiments of a thread came to.
#[derive(Default)]
struct Tally {
    requests: u64,
    faults: u64,
    errors: BTreeMap<String, u64>,
    /// By what did not hold, the seeds.
    broken: BTreeMap<String, Vec<u64>>,
    /// The most processor time that a seed took, and which seed.
    slowest: Option<(Duration, u64)>,
    /// Processor time of all.
    took: Duration,
}

/// How much processor time a thread has had: its neighbours on a busy machine count for nothing. Up to a tick of the kernel, 4 ms as a
/// rule, may be missing; where the kernel does not say it at all, the time on the clock takes its place.
struct Stopwatch {
    began: Instant,
    had: Option<Duration>,
}

impl Stopwatch {
    fn start() -> Self {
        Self {
            began: Instant::now(),
            had: Self::processor_time(),
        }
    }

    fn elapsed(&self) -> Duration {
        let had = self.had.zip(Self::processor_time());
        had.map_or_else(|| self.began.elapsed(), |(before, now)| now.saturating_sub(before))
    }

    /// Of this thread, since it began.
    fn processor_time() -> Option<Duration> {
        let counts = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        counts.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
    }
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let seeds: u64 = arguments.next().ok_or("expected a number of seeds")?.parse()?;
    let first: u64 = arguments.next().map_or(Ok(1), |first| first.parse())?;
    // A violation is printed below, with what replays it.
    std::panic::set_hook(Box::new(|_| {}));
    let began = Instant::now();
    let tally = run_all(first, seeds);
    print(&tally, first, seeds);
    let (slowest, seed) = tally.slowest.unwrap_or_default();
    eprintln!(
        "{:.1} s; {:.2} ms of a core a seed, of the slowest {:.0} ms (seed `{seed}`)",
        began.elapsed().as_secs_f64(),
        tally.took.as_secs_f64() * 1e3 / seeds.max(1) as f64,
        slowest.as_secs_f64() * 1e3
    );
    Ok(ExitCode::from(u8::from(!tally.broken.is_empty())))
}

fn run_all(first: u64, seeds: u64) -> Tally {
    let next = AtomicU64::new(first);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let work = || {
        let mut tally = Tally::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= first + seeds {
                return tally;
            }
            tally.add(seed);
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        let tallies = threads
            .into_iter()
            .map(|thread| thread.join().expect("violations are caught"));
        tallies.fold(Tally::default(), Tally::and)
    })
}

fn print(tally: &Tally, first: u64, seeds: u64) {
    println!(
        "{seeds} seeds from `{first}`: {} requests, {} faults, ended with an error: {:?}",
        tally.requests, tally.faults, tally.errors
    );
    for (kind, seeds) in &tally.broken {
        let few: Vec<_> = seeds.iter().take(SHOWN).collect();
        println!("VIOLATED {kind}: `{}` seeds, such as {few:?}", seeds.len());
    }
    for (_, seeds) in tally.broken.iter().take(SHOWN) {
        if let Some(failure) = seeds.first().and_then(|seed| examined(*seed)) {
            println!("{failure}");
        }
    }
}

fn examined(seed: u64) -> Option<Box<Failure>> {
    Scenario::draw(seed).examine().err()
}

impl Tally {
    fn add(&mut self, seed: u64) {
        let watch = Stopwatch::start();
        let scenario = Scenario::draw(seed);
        self.faults += scenario.config.faults.len() as u64;
        match scenario.run() {
            Ok(outcome) => {
                self.requests += outcome.run.requests.len() as u64;
                for error in outcome.run.requests.iter().filter_map(|request| request.error.clone()) {
                    *self.errors.entry(error).or_default() += 1;
                }
            }
            Err(violation) => self.broken.entry(violation.kind).or_default().push(seed),
        }
        let took = watch.elapsed();
        self.took += took;
        self.slowest = self.slowest.max(Some((took, seed)));
    }

    fn and(mut self, other: Self) -> Self {
        self.requests += other.requests;
        self.faults += other.faults;
        self.took += other.took;
        self.slowest = self.slowest.max(other.slowest);
        for (error, count) in other.errors {
            *self.errors.entry(error).or_default() += count;
        }
        for (kind, seeds) in other.broken {
            let all = self.broken.entry(kind).or_default();
            all.extend(seeds);
            all.sort_unstable();
        }
        self
    }
}
