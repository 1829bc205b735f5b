//! `homing worker`: one embedded engine. Its first line on stdout says where it listens, as JSON.

use crate::args::{self, EngineArgs, EvictionArg, RoleArg};
use crate::commands::runtime;
use crate::failure::Usage;
use crate::output::say;
use anyhow::Result;
use homing_engine::StepModel;
use homing_model::{ModelSpec, default_cache_dir};
use homing_worker::{Compute, Limits, Listen, ReplayLimits, Role, StartError, Worker, WorkerConfig};
use std::path::Path;
use tokio_util::sync::CancellationToken;

/// Runs a worker until it is told to stop.
pub fn run(args: args::Worker) -> Result<()> {
    let config = WorkerConfig {
        name: args.name,
        role: role(args.role),
        compute: compute(&args.engine)?,
        cache_dir: default_cache_dir(),
        listen: Listen::at(args.listen),
        kv_tokens: args.engine.kv_tokens,
        block_size: args.engine.block_size,
        expects_returns: args.engine.eviction == EvictionArg::Expected,
        limits: Limits {
            replay: ReplayLimits {
                batches: args.kv_replay_batches as usize,
                bytes: args.kv_replay_bytes as usize,
            },
            ..Limits::default()
        },
        ..WorkerConfig::default()
    };
    let exit_with_stdin = args.exit_with_stdin;
    runtime()?.block_on(async move {
        let worker = Worker::start(config).await.map_err(start_error)?;
        println!("{}", serde_json::to_string(&worker.endpoints())?);
        let stop = worker.stop_token();
        if exit_with_stdin {
            stop_with_stdin(stop.clone());
        } else {
            say(format_args!(
                "worker {} serves {} at http://{}",
                worker.info().name,
                worker.info().model,
                worker.endpoints().http
            ));
        }
        tokio::select! {
            () = stop.cancelled() => {}
            signal = super::shutdown_signal() => signal?,
        }
        worker.shutdown().await;
        Ok(())
    })
}

/// What computes, as the command line says it.
pub fn compute(args: &EngineArgs) -> Result<Compute> {
    match &args.step_model {
        Some(name) => Ok(Compute::Steps(Box::new(step_model(name)?))),
        None => Ok(Compute::Model(model(&args.model)?)),
    }
}

/// The model that a name means.
pub fn model(name: &str) -> Result<ModelSpec> {
    name.parse().map_err(Usage::error)
}

/// The step model of this name, or in this file.
pub fn step_model(name: &str) -> Result<StepModel> {
    if Path::new(name).extension().is_some_and(|extension| extension == "toml") {
        let text = std::fs::read_to_string(name)
            .map_err(|error| Usage::error(format_args!("step model `{name}`: {error}")))?;
        return StepModel::from_toml(&text).map_err(|error| Usage::error(format_args!("step model `{name}`: {error}")));
    }
    StepModel::profile(name).map_err(Usage::error)
}

/// A taken port, a model that cannot be used or a setting that makes no sense is wrong input; the rest is a failure.
fn start_error(error: StartError) -> anyhow::Error {
    match error {
        StartError::Thread(_) | StartError::Loader(_) => error.into(),
        _ => Usage::error(error),
    }
}

const fn role(role: RoleArg) -> Role {
    match role {
        RoleArg::Prefill => Role::Prefill,
        RoleArg::Decode => Role::Decode,
        RoleArg::Both => Role::Both,
    }
}

/// Stops when standard input ends. A thread, because reading a terminal or a pipe cannot be cancelled.
fn stop_with_stdin(stop: CancellationToken) {
    std::thread::spawn(move || {
        // Whatever is written there, and whatever error ends it, the parent is gone.
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        stop.cancel();
    });
}
