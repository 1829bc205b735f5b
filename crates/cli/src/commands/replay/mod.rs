//! `homing replay`: a trace against a live endpoint, in causal order, as its clients would send it.

pub mod client;
mod message;

use crate::args::{self, WorkloadArgs};
use crate::commands::runtime;
use crate::failure::Usage;
use crate::output::{self, OutFolder};
use crate::results::{self, Progress, replay_config};
use crate::trace_file;
use anyhow::{Context, Result, ensure};
use client::{Answer, Endpoint};
use homing_report::{ClassBounds, Experiment, Path, Report, RequestRecord, RunRecord, WorkerRecord};
use homing_units::Instant;
use homing_workload::{Replay, Start, Trace, TurnRef};
use message::Message;
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Replays the trace, once for each run, and reports what the client saw.
pub fn run(args: args::Replay) -> Result<()> {
    output::clean_up_when_interrupted()?;
    let out = results::out_folder(args.workload.out.as_deref())?;
    runtime()?.block_on(replay(args, out))
}

async fn replay(args: args::Replay, out: Option<OutFolder>) -> Result<()> {
    let endpoint = Endpoint::new(&args.url).map_err(Usage::error)?;
    let target = Target::discover(&endpoint, &args).await?;
    let (mut runs, mut experiment) = (Vec::new(), None);
    for seed in args.workload.seeds() {
        let trace = Arc::new(trace_file::open(args.workload.trace()?, seed)?);
        let start = start(&args.workload, &trace, target.workers.len());
        let plan = Replay::new(&trace, &replay_config(&args.workload, start, seed)).map_err(Usage::error)?;
        results::say_scale(args.workload.time_scale);
        let left_out = results::left_out(plan.left_out());
        let message = Message::new(&target.model, &args, seed);
        let requests = Run {
            endpoint: &endpoint,
            trace: Arc::clone(&trace),
            message,
        }
        .drive(plan)
        .await;
        runs.push(RunRecord {
            seed,
            workers: target.records(),
            requests,
        });
        experiment.get_or_insert_with(|| Experiment {
            trace: trace.name.clone(),
            cluster: args.url.clone(),
            policy: target.policy.clone(),
            time_scale: args.workload.time_scale,
            block_size: target.block_size,
            classes: ClassBounds::default(),
            left_out,
        });
    }
    let experiment = experiment.context("at least one run")?;
    let report = Report::new(&experiment, &runs);
    let logs = vec![("requests.jsonl".to_owned(), results::request_lines(&runs))];
    results::publish(&report, &logs, out, args.workload.json)?;
    let served = |run: &homing_report::Run| run.completed > 0 || run.requests == 0;
    ensure!(
        report.runs.iter().any(served),
        "no request was answered to the end: see `errors` in the report"
    );
    Ok(())
}

/// Sessions start as asked, else as recorded, else four live ones for each worker.
fn start(args: &WorkloadArgs, trace: &Trace, workers: usize) -> Start {
    results::start(args).unwrap_or_else(|| Start::default_for(trace, u32::try_from(workers).unwrap_or(u32::MAX).max(1)))
}

/// What the endpoint says of itself.
struct Target {
    model: String,
    /// Name and role of each worker, where the endpoint is a router of ours.
    workers: Vec<(String, String)>,
    policy: String,
    block_size: Option<u32>,
}

impl Target {
    async fn discover(endpoint: &Endpoint, args: &args::Replay) -> Result<Self> {
        endpoint.until_ready().await;
        let models = endpoint.get("/v1/models").await.map_err(|error| {
            Usage::error(format_args!(
                "`{}` cannot be reached, expected an OpenAI endpoint: {error}",
                args.url
            ))
        })?;
        let listed = models
            .as_ref()
            .and_then(|models| models["data"][0]["id"].as_str())
            .map(str::to_owned);
        let model = args
            .model
            .clone()
            .or(listed)
            .context("the endpoint lists no model: name one with --model")?;
        let admin = endpoint.get("/admin/workers").await.ok().flatten().unwrap_or_default();
        let text = |value: &Value, name: &str| value[name].as_str().unwrap_or("unknown").to_owned();
        let workers = admin["data"].as_array().map(Vec::as_slice).unwrap_or_default();
        Ok(Self {
            model,
            workers: workers
                .iter()
                .map(|worker| (text(worker, "name"), text(worker, "role")))
                .collect(),
            policy: text(&admin, "policy"),
            block_size: admin["block_size"].as_u64().and_then(|size| u32::try_from(size).ok()),
        })
    }

    /// What is known of the workers from outside: their names and roles.
    fn records(&self) -> Vec<WorkerRecord> {
        let record = |(name, role): &(String, String)| WorkerRecord {
            name: name.clone(),
            role: role.clone(),
            ..WorkerRecord::default()
        };
        self.workers.iter().map(record).collect()
    }
}

/// One run under way.
struct Run<'a> {
    endpoint: &'a Endpoint,
    trace: Arc<Trace>,
    message: Message,
}

impl Run<'_> {
    /// Sends turns when they are due until all have ended.
    async fn drive(&self, mut plan: Replay) -> Vec<RequestRecord> {
        let began = tokio::time::Instant::now();
        let now = || Instant::ZERO + began.elapsed();
        let progress = Progress::new(plan.turn_count());
        let (sender, mut ended) = mpsc::unbounded_channel();
        let mut records: Vec<RequestRecord> = Vec::new();
        let mut agents = BTreeSet::new();
        while !plan.done() {
            while let Some(turn) = plan.poll_due(now()) {
                let first = agents.insert((turn.session, self.trace.turn(turn).agent));
                let number = records.len();
                records.push(self.record(number as u64, turn, now(), first));
                self.send(number, turn, sender.clone());
            }
            let next = plan.next_due().map(|due| began + (due - Instant::ZERO));
            tokio::select! {
                Some((number, turn, answer)) = ended.recv() => {
                    fill(&mut records[number], answer);
                    plan.ended(now(), turn);
                    progress.set(plan.turns_ended());
                }
                () = sleep_until(next) => {}
            }
        }
        progress.finish();
        records
    }

    /// Sends one turn from a task of its own; the number of tasks is the number of turns in flight, which the plan bounds.
    fn send(&self, number: usize, turn: TurnRef, ended: mpsc::UnboundedSender<(usize, TurnRef, Answer)>) {
        let (endpoint, trace, message) = (self.endpoint.clone(), Arc::clone(&self.trace), self.message.clone());
        tokio::spawn(async move {
            let due = tokio::time::Instant::now();
            let made = tokio::task::spawn_blocking(move || message.of(&trace, turn)).await;
            let made_in = due.elapsed();
            let answer = match made {
                Ok(outgoing) => Answer {
                    made_in,
                    ..endpoint.send(outgoing).await
                },
                Err(_) => Answer {
                    error: Some("not_sent".to_owned()),
                    ..Answer::default()
                },
            };
            // The receiver lives until every turn has ended.
            let _ = ended.send((number, turn, answer));
        });
    }

    fn record(&self, request: u64, turn: TurnRef, arrival: Instant, first_of_agent: bool) -> RequestRecord {
        let of = self.trace.turn(turn);
        RequestRecord {
            request,
            session: turn.session,
            session_name: self.trace.sessions[turn.session as usize].id.clone(),
            agent: of.agent,
            turn: turn.turn,
            first_of_agent,
            arrival,
            first_token: None,
            end: arrival,
            itl_max: None,
            prompt_tokens: self.message.tokens(of.prompt_tokens),
            cached_tokens: 0,
            output_tokens: 0,
            path: None,
            worker: None,
            prefill_worker: None,
            error: None,
        }
    }
}

/// Adds what became of a turn to its record. Arrival is when it was sent: making its body is not the endpoint's time.
fn fill(record: &mut RequestRecord, answer: Answer) {
    record.arrival += answer.made_in;
    record.first_token = answer.first_token.map(|after| record.arrival + after);
    record.end = record.arrival + answer.end;
    record.itl_max = (answer.output_tokens > 1).then_some(answer.itl_max);
    record.prompt_tokens = answer.prompt_tokens.unwrap_or(record.prompt_tokens);
    record.cached_tokens = answer.cached_tokens.unwrap_or(0);
    record.output_tokens = answer.output_tokens;
    record.path = answer.path.as_deref().and_then(Path::from_name);
    record.worker = answer.worker;
    record.error = answer.error;
}

async fn sleep_until(at: Option<tokio::time::Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
