//! Sessions that go on until told to stop, and what came of their turns.

use crate::processes::http::{End, post};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Prompt tokens of a session's first turn.
const FIRST_PROMPT: usize = 600;
/// Prompt tokens that each turn adds.
const GROWTH: usize = 120;
/// Turns before a session begins anew.
const TURNS: usize = 12;
/// Between the end of a turn and the next.
const GAP: Duration = Duration::from_millis(1_500);
/// Answers that are kept to be asked for again.
const KEPT: usize = 400;

/// Sessions at work.
pub struct Load {
    stop: Arc<AtomicBool>,
    outcome: Arc<Mutex<Outcome>>,
    threads: Vec<JoinHandle<()>>,
}

/// What came of the turns.
#[derive(Default)]
pub struct Outcome {
    pub completed: u64,
    /// Answers that ended well and do not have the length that was asked for.
    pub wrong_length: u64,
    /// By code.
    pub typed: BTreeMap<String, u64>,
    /// By what was seen.
    pub lost: BTreeMap<String, u64>,
    /// The longest that a client saw nothing in the middle of an answer.
    pub longest_pause: Duration,
    /// Turns whose answers went on after the longest pauses: to be asked for again.
    pub kept: Vec<Turn>,
}

/// A turn and its answer.
#[derive(Clone)]
pub struct Turn {
    pub body: Value,
    pub text: String,
    pub pause: Duration,
}

impl Load {
    /// Starts so many sessions whose answers have so many tokens.
    pub fn start(router: SocketAddr, model: &str, sessions: u32, answer: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let outcome: Arc<Mutex<Outcome>> = Arc::default();
        let threads = (0..sessions).map(|session| {
            let (stop, outcome, model) = (Arc::clone(&stop), Arc::clone(&outcome), model.to_owned());
            std::thread::spawn(move || talk(router, &model, session, answer, &stop, &outcome))
        });
        let threads = threads.collect();
        Self { stop, outcome, threads }
    }

    /// Lets every turn that is under way end; gives what came of all.
    pub fn finish(self) -> Outcome {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            // One that panicked has said so.
            drop(thread.join());
        }
        std::mem::take(&mut *self.outcome.lock().expect("no holder panics"))
    }
}

/// A turn's request: token ids of its session, the same for the same place.
pub fn request(model: &str, session: u32, tokens: usize, answer: usize) -> Value {
    let id = |place: usize| (session as usize * 7_919 + place * 31) % 26 + usize::from(b'a');
    let prompt: Vec<usize> = (0..tokens).map(id).collect();
    json!({
        "model": model, "prompt": prompt, "max_tokens": answer, "temperature": 0, "ignore_eos": true, "stream": true,
    })
}

fn talk(router: SocketAddr, model: &str, session: u32, answer: usize, stop: &AtomicBool, outcome: &Mutex<Outcome>) {
    for round in 0.. {
        for turn in 0..TURNS {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            let body = request(model, session + round * 10_000, FIRST_PROMPT + turn * GROWTH, answer);
            let (ended, end) = ask(router, &format!("live-{session}-{round}"), body);
            outcome.lock().expect("no holder panics").add(ended, end, answer);
            std::thread::sleep(GAP);
        }
    }
}

/// One turn, from its request to its end.
pub fn ask(router: SocketAddr, session: &str, body: Value) -> (Turn, End) {
    let mut last: Option<Instant> = None;
    let mut pause = Duration::ZERO;
    let (text, end) = match post(router, "/v1/completions", session, &body) {
        Ok(response) => response.completion(|_| {
            pause = pause.max(last.map_or(Duration::ZERO, |last| last.elapsed()));
            last = Some(Instant::now());
            true
        }),
        Err(error) => (String::new(), End::Lost(format!("{error:#}"))),
    };
    (Turn { body, text, pause }, end)
}

impl Outcome {
    fn add(&mut self, turn: Turn, end: End, answer: usize) {
        match end {
            End::Done => {
                self.completed += 1;
                self.wrong_length += u64::from(turn.text.len() != answer);
                self.longest_pause = self.longest_pause.max(turn.pause);
                self.kept.push(turn);
                self.kept.sort_by_key(|turn| std::cmp::Reverse(turn.pause));
                self.kept.truncate(KEPT);
            }
            End::Typed(code) => *self.typed.entry(code).or_default() += 1,
            End::Lost(why) => *self.lost.entry(why).or_default() += 1,
        }
    }

    /// Turns of any end.
    pub fn all(&self) -> u64 {
        self.completed + self.typed.values().sum::<u64>() + self.lost.values().sum::<u64>()
    }

    /// The share of turns that completed.
    pub fn share(&self) -> f64 {
        self.completed as f64 / (self.all() as f64).max(1.0)
    }
}
