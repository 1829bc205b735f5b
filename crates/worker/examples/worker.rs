//! Runs workers until Ctrl-C: `cargo run -p homing-worker --example worker -- tiny 8100 8101 8102`, the model (or
//! `step:PROFILE`) and an HTTP port for each worker. The command line of `homing` does the same with more to choose from.

use homing_engine::StepModel;
use homing_worker::{Compute, Listen, Worker, WorkerConfig};
use std::error::Error;
use std::net::{Ipv4Addr, SocketAddr};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let model = arguments
        .next()
        .ok_or("no model named, expected `tiny`, `smollm2`, a path or `step:PROFILE`")?;
    let compute = match model.strip_prefix("step:") {
        Some(profile) => Compute::Steps(Box::new(StepModel::profile(profile)?)),
        None => Compute::Model(model.parse()?),
    };
    let mut workers = Vec::new();
    for (index, port) in arguments.enumerate() {
        let http = SocketAddr::from((Ipv4Addr::LOCALHOST, port.parse()?));
        let config = WorkerConfig {
            name: format!("w{index}"),
            compute: compute.clone(),
            listen: Listen::at(http),
            ..WorkerConfig::default()
        };
        let worker = Worker::start(config).await?;
        println!("{}", serde_json::to_string(worker.info())?);
        workers.push(worker);
    }
    tokio::signal::ctrl_c().await?;
    for worker in workers {
        worker.shutdown().await;
    }
    Ok(())
}
