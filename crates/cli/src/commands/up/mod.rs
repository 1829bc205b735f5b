//! `homing up`: a whole cluster on this machine. Workers are processes of their own; the router runs in this one.

mod fleet;

use crate::args::{self, EngineArgs, EvictionArg, RoleArg};
use crate::commands::replay::client::Endpoint;
use crate::commands::serve::{self, print_turns, recording};
use crate::commands::{runtime, shutdown_signal, worker};
use crate::failure::Usage;
use crate::output::say;
use anyhow::Result;
use fleet::{Fleet, Recipe};
use homing_gateway::{EngineKind, Gateway, GatewayConfig, WorkerSpec};
use homing_model::{ModelSpec, default_cache_dir, open_vocabulary, resolve};
use homing_router::RouterConfig;
use homing_router::event::Role;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;

/// Starts the cluster and serves until it is told to stop.
pub fn run(args: args::Up) -> Result<()> {
    let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, args.port));
    // Asked before the workers load their model: a taken port should be said at once.
    TcpListener::bind(listen)
        .map_err(|error| Usage::error(format_args!("port {} cannot be used: {error}", args.port)))?;
    let router = RouterConfig {
        block_size: args.engine.block_size,
        policy: args.router.policy.parse().map_err(Usage::error)?,
        ..RouterConfig::default()
    };
    let prepared = Prepared::new(&args.engine)?;
    let workers = args.workers.workers();
    let record = recording(args.router.record);
    runtime()?.block_on(serve(listen, router, record, workers, prepared))
}

async fn serve(
    listen: SocketAddr,
    router: RouterConfig,
    record: Option<PathBuf>,
    workers: Vec<(String, RoleArg)>,
    prepared: Prepared,
) -> Result<()> {
    let recipes: Vec<Recipe> = workers
        .into_iter()
        .map(|(name, role)| Recipe {
            name,
            role,
            engine: prepared.engine.clone(),
        })
        .collect();
    say(format_args!(
        "starting {} workers with {} ...",
        recipes.len(),
        prepared.label
    ));
    let fleet = tokio::select! {
        started = Fleet::start(&recipes) => started?,
        signal = shutdown_signal() => return signal,
    };
    let specs = recipes
        .iter()
        .zip(&fleet.addresses)
        .map(|(recipe, address)| spec(recipe, *address))
        .collect();
    let tokenizer = Some(prepared.tokenizer);
    let config = GatewayConfig {
        listen,
        workers: specs,
        router,
        tokenizer,
        record,
        ..GatewayConfig::default()
    };
    let gateway = match serve::start(config).await {
        Ok(gateway) => gateway,
        Err(error) => {
            fleet.stop().await;
            return Err(error);
        }
    };
    // What is greeted works: the first request of a newcomer should not meet workers that are still being found. One that can
    // serve is not enough: while the prefill worker is not there yet, the first turn would go without it.
    Endpoint::new(&format!("http://{}", gateway.local_addr()))
        .map_err(Usage::error)?
        .until_workers(recipes.len())
        .await;
    greet(&gateway, &recipes, &fleet.addresses, &prepared.model_name);
    let printed = tokio::spawn(print_turns(gateway.turns()));
    let signal = shutdown_signal().await;
    say("stopping ... (once more to stop at once)");
    tokio::select! {
        () = gateway.shutdown() => {}
        _ = shutdown_signal() => say("requests under way are given up"),
    }
    printed.abort();
    fleet.stop().await;
    signal
}

/// Says where everything is, and what to try.
fn greet(gateway: &Gateway, recipes: &[Recipe], addresses: &[SocketAddr], model: &str) {
    let url = format!("http://{}", gateway.local_addr());
    println!("homing is up at {url} (OpenAI base URL: {url}/v1)\n");
    for (recipe, address) in recipes.iter().zip(addresses) {
        println!("  {:<4} {:<8} http://{address}", recipe.name, recipe.role.as_str());
    }
    println!("\ntry:\n  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\");
    println!(
        "    -d '{{\"model\":\"{model}\",\"stream\":true,\"max_tokens\":40,\"messages\":[{{\"role\":\"user\",\"content\":\"What is the capital of France?\"}}]}}'"
    );
    println!("\none line for each turn (session, path, worker, cached / prompt tokens, TTFT); Ctrl-C stops it all\n");
}

fn spec(recipe: &Recipe, address: SocketAddr) -> WorkerSpec {
    let role = match recipe.role {
        RoleArg::Prefill => Role::Prefill,
        RoleArg::Decode => Role::Decode,
        RoleArg::Both => Role::Both,
    };
    WorkerSpec {
        name: Some(recipe.name.clone()),
        role: Some(role),
        ..WorkerSpec::new(format!("http://{address}"), EngineKind::Homing)
    }
}

/// What is found out once, before the workers start: they would fetch the same model side by side.
struct Prepared {
    /// Arguments of each worker.
    engine: Vec<String>,
    /// The model whose words the router tokenises with.
    tokenizer: String,
    /// The model's name in requests.
    model_name: String,
    /// The model, in a few words.
    label: String,
}

impl Prepared {
    fn new(args: &EngineArgs) -> Result<Self> {
        let mut engine = vec!["--block-size".to_owned(), args.block_size.to_string()];
        if args.eviction == EvictionArg::Expected {
            engine.extend(["--eviction".to_owned(), "expected".to_owned()]);
        }
        if let Some(tokens) = args.kv_tokens {
            if tokens < args.block_size {
                let expected = format_args!(
                    "--kv-tokens is {tokens}, expected at least one block of {}",
                    args.block_size
                );
                return Err(Usage::error(expected));
            }
            engine.extend(["--kv-tokens".to_owned(), tokens.to_string()]);
        }
        if let Some(profile) = &args.step_model {
            let model_name = worker::step_model(profile)?.model;
            engine.extend(["--step-model".to_owned(), profile.clone()]);
            let label = format!("the step times of {profile}");
            return Ok(Self {
                engine,
                tokenizer: "tiny".to_owned(),
                model_name,
                label,
            });
        }
        let (spec, warning) = resolve(&worker::model(&args.model)?, &default_cache_dir()).map_err(Usage::error)?;
        if let Some(warning) = warning {
            say(format_args!("warning: {warning}"));
        }
        let (vocabulary, _) = open_vocabulary(&spec, &default_cache_dir()).map_err(Usage::error)?;
        let tokenizer = argument(&spec);
        engine.extend(["--model".to_owned(), tokenizer.clone()]);
        let model_name = vocabulary.name;
        Ok(Self {
            engine,
            tokenizer,
            label: format!("the model {model_name}"),
            model_name,
        })
    }
}

/// How a worker is told of a resolved model.
fn argument(spec: &ModelSpec) -> String {
    match spec {
        ModelSpec::Auto => "auto".to_owned(),
        ModelSpec::Tiny => "tiny".to_owned(),
        ModelSpec::SmolLm2 => "smollm2".to_owned(),
        ModelSpec::Path(path) => path.display().to_string(),
    }
}
