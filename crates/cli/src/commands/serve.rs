//! `homing serve`: the router before existing engines.

use crate::args;
use crate::commands::{runtime, shutdown_signal};
use crate::failure::Usage;
use crate::output::say;
use anyhow::{Context, Result};
use homing_gateway::{EngineKind, Gateway, GatewayConfig, TurnLog, WorkerSpec};
use homing_router::event::Role;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use tokio::sync::broadcast::error::RecvError;

/// Runs the router until it is told to stop.
pub fn run(args: args::Serve) -> Result<()> {
    let config = configuration(args)?;
    runtime()?.block_on(async move {
        let workers = config.workers.len();
        let gateway = start(config).await?;
        say(format_args!(
            "homing routes to {workers} workers at http://{}",
            gateway.local_addr()
        ));
        let printed = tokio::spawn(print_turns(gateway.turns()));
        shutdown_signal().await?;
        gateway.shutdown().await;
        printed.abort();
        Ok(())
    })
}

/// Starts the gateway; what cannot start because of what was asked for is wrong input.
pub async fn start(config: GatewayConfig) -> Result<Gateway> {
    Gateway::start(config).await.map_err(Usage::error)
}

/// A live line for each turn, for as long as somebody reads them.
pub async fn print_turns(mut turns: tokio::sync::broadcast::Receiver<TurnLog>) {
    loop {
        let line = match turns.recv().await {
            Ok(turn) => turn.to_string(),
            Err(RecvError::Lagged(missed)) => format!("... {missed} turns are not shown"),
            Err(RecvError::Closed) => return,
        };
        if writeln!(std::io::stdout(), "{line}").is_err() {
            return;
        }
    }
}

/// Where a recording goes: the file itself, or `events.bin` in a folder.
pub fn recording(path: Option<PathBuf>) -> Option<PathBuf> {
    path.map(|path| if path.is_dir() { path.join("events.bin") } else { path })
}

/// The file, and the options that win over it.
fn configuration(args: args::Serve) -> Result<GatewayConfig> {
    let mut config = args
        .config
        .as_deref()
        .map_or_else(|| Ok(GatewayConfig::default()), read)?;
    for worker in &args.workers {
        config.workers.push(parse_worker(worker)?);
    }
    if config.workers.is_empty() {
        return Err(Usage::error(
            "no worker, expected `--worker URL[,role=..]` or `[[workers]]` in the configuration",
        ));
    }
    if let Some(listen) = args.listen {
        config.listen = listen;
    }
    if let Some(policy) = args.policy {
        config.router.policy = policy.parse().map_err(Usage::error)?;
    }
    config.tokenizer = args.model.or(config.tokenizer);
    config.record = recording(args.record).or(config.record);
    Ok(config)
}

fn read(path: &Path) -> Result<GatewayConfig> {
    let wrong =
        |error: &dyn std::fmt::Display| Usage::error(format_args!("configuration `{}`: {error}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| wrong(&error))?;
    toml::from_str(&text)
        .map_err(|error| wrong(&error))
        .context("reading the configuration")
}

/// `URL[,key=value]...`
fn parse_worker(text: &str) -> Result<WorkerSpec> {
    let mut parts = text.split(',');
    let mut worker = WorkerSpec::new(parts.next().unwrap_or_default(), EngineKind::default());
    for part in parts {
        let wrong = |expected: &str| Usage::error(format_args!("worker `{text}`: expected {expected}, found `{part}`"));
        let (key, value) = part.split_once('=').ok_or_else(|| wrong("`key=value`"))?;
        match key {
            "role" => worker.role = Some(parse_role(value).ok_or_else(|| wrong("`role=prefill`, `decode` or `both`"))?),
            "kind" => worker.kind = parse_kind(value).ok_or_else(|| wrong("`kind=homing`, `vllm` or `sglang`"))?,
            "name" => worker.name = Some(value.to_owned()),
            "kv_events" => worker.kv_events = Some(value.to_owned()),
            "kv_replay" => worker.kv_replay = Some(value.to_owned()),
            "kv_tokens" => {
                worker.kv_tokens = Some(
                    value
                        .parse()
                        .map_err(|_| wrong("`kv_tokens=` and a number of tokens"))?,
                )
            }
            "data_parallel_rank" => {
                worker.data_parallel_rank = Some(
                    value
                        .parse()
                        .map_err(|_| wrong("`data_parallel_rank=` and a number from 0"))?,
                )
            }
            "bootstrap" => worker.bootstrap = Some(value.to_owned()),
            "transfers" => worker.transfers = Some(value.parse().map_err(|_| wrong("`transfers=true` or `false`"))?),
            _ => {
                return Err(wrong(
                    "`role`, `kind`, `name`, `kv_events`, `kv_replay`, `kv_tokens`, `transfers`, `data_parallel_rank` or \
                     `bootstrap`",
                ));
            }
        }
    }
    Ok(worker)
}

fn parse_role(text: &str) -> Option<Role> {
    match text {
        "prefill" => Some(Role::Prefill),
        "decode" => Some(Role::Decode),
        "both" => Some(Role::Both),
        _ => None,
    }
}

fn parse_kind(text: &str) -> Option<EngineKind> {
    match text {
        "homing" => Some(EngineKind::Homing),
        "vllm" => Some(EngineKind::Vllm),
        "sglang" => Some(EngineKind::Sglang),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_an_address_and_what_is_known_of_it() {
        let worker = parse_worker("http://127.0.0.1:8001,role=prefill,kind=homing,name=p7,kv_tokens=4096").unwrap();
        assert_eq!(worker.url, "http://127.0.0.1:8001");
        assert_eq!((worker.role, worker.kind), (Some(Role::Prefill), EngineKind::Homing));
        assert_eq!((worker.name.as_deref(), worker.kv_tokens), (Some("p7"), Some(4096)));
        let ranked = parse_worker("http://h:30000,kind=sglang,data_parallel_rank=2,bootstrap=h:8998").unwrap();
        assert_eq!((ranked.kind, ranked.role), (EngineKind::Sglang, None));
        assert_eq!(
            (ranked.data_parallel_rank, ranked.bootstrap.as_deref()),
            (Some(2), Some("h:8998"))
        );
        for wrong in [
            "u,role=decoder",
            "u,kind=x",
            "u,role",
            "u,rolle=both",
            "u,kv_tokens=many",
            "u,data_parallel_rank=-1",
        ] {
            assert_eq!(
                crate::failure::exit_code(&parse_worker(wrong).unwrap_err()),
                2,
                "{wrong}"
            );
        }
    }
}
