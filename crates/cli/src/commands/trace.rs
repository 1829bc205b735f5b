//! `homing trace`: looks at traces, translates them, and writes those of generators.
//!
//! A file appears under its name when it is whole: it is written beside it under another name first, which goes away
//! when something fails. What the written format cannot carry is said on stderr, and is no error.

use crate::failure::Usage;
use crate::trace_args::{Convert, Format, Generate, Reading, Stats, TraceArgs, TraceCommand};
use crate::trace_file;
use anyhow::{Context, Result};
use homing_workload::stats::{Quantiles, TraceStats, stats};
use homing_workload::{ReadOptions, Trace, is_generator, losses, write_trace};
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Runs the command.
pub fn run(args: &TraceArgs) -> Result<()> {
    match &args.command {
        TraceCommand::Stats(args) => show(args),
        TraceCommand::Convert(args) => convert(args),
        TraceCommand::Generate(args) => generate(args),
    }
}

fn show(args: &Stats) -> Result<()> {
    let stats = stats(&open(&args.trace, &args.reading)?);
    let text = if args.json {
        serde_json::to_string_pretty(&stats).context("the figures are no JSON")? + "\n"
    } else {
        table(&stats)
    };
    std::io::stdout()
        .write_all(text.as_bytes())
        .context("stdout takes nothing")
}

fn convert(args: &Convert) -> Result<()> {
    let trace = open(&args.trace, &args.reading)?;
    write(&trace, args.to, &args.out)
}

fn generate(args: &Generate) -> Result<()> {
    if !is_generator(&args.generator) {
        let line = format!(
            "`{}` is no generator, expected a name such as `gen:agent`",
            args.generator
        );
        return Err(Usage::error(line));
    }
    write(&trace_file::open(&args.generator, args.seed)?, args.to, &args.out)
}

fn open(name: &str, reading: &Reading) -> Result<Trace> {
    let options = ReadOptions {
        shared_boilerplate: !reading.separate_boilerplate,
        block_size: reading.block_size,
    };
    trace_file::open_with(name, reading.seed, &options)
}

/// Writes the trace, whole or not at all.
fn write(trace: &Trace, format: Format, out: &Path) -> Result<()> {
    let partial = Partial::create(out)?;
    let unwritten = || format!("`{}` cannot be written", out.display());
    let sink = BufWriter::with_capacity(1 << 20, partial.file()?);
    match out.extension().and_then(|extension| extension.to_str()) {
        Some("zst") => {
            let mut packed = zstd::Encoder::new(sink, 0).with_context(unwritten)?;
            write_trace(trace, format.into(), &mut packed).with_context(unwritten)?;
            packed
                .finish()
                .and_then(|mut sink| sink.flush())
                .with_context(unwritten)?;
        }
        Some("gz") => {
            let mut packed = flate2::write::GzEncoder::new(sink, flate2::Compression::default());
            write_trace(trace, format.into(), &mut packed).with_context(unwritten)?;
            packed
                .finish()
                .and_then(|mut sink| sink.flush())
                .with_context(unwritten)?;
        }
        _ => {
            let mut sink = sink;
            write_trace(trace, format.into(), &mut sink).with_context(unwritten)?;
            sink.flush().with_context(unwritten)?;
        }
    }
    partial.keep(out).with_context(unwritten)?;
    for loss in losses(trace, format.into()) {
        eprintln!("note: not carried: {loss}");
    }
    eprintln!(
        "wrote {} requests of {} sessions to {}",
        trace.turn_count(),
        trace.sessions.len(),
        out.display()
    );
    Ok(())
}

/// A file under a name of its own until it is whole; removed when dropped before.
struct Partial {
    path: PathBuf,
    file: Option<File>,
    kept: bool,
}

impl Partial {
    fn create(out: &Path) -> Result<Self> {
        let wrong = |problem: &str| Usage::error(format!("output `{}`: {problem}", out.display()));
        let name = out
            .file_name()
            .ok_or_else(|| wrong("no file name, expected a path to a file"))?;
        if out.is_dir() {
            return Err(wrong("is a folder, expected a path to a file"));
        }
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".partial-{}", std::process::id()));
        let path = out.with_file_name(hidden);
        let file = File::create(&path).map_err(|error| wrong(&error.to_string()))?;
        Ok(Self {
            path,
            file: Some(file),
            kept: false,
        })
    }

    /// The open file.
    fn file(&self) -> Result<File> {
        let file = self.file.as_ref().context("the file is open until it is kept")?;
        file.try_clone().context("the file cannot be opened twice")
    }

    /// Gives the file its name.
    fn keep(mut self, out: &Path) -> std::io::Result<()> {
        std::fs::rename(&self.path, out)?;
        self.kept = true;
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.kept {
            // Nobody is left to tell where this fails.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// The figures for a person.
fn table(stats: &TraceStats) -> String {
    let mut text = format!(
        "{}: {} sessions, {} requests ({} of {} sub-agents), blocks of {} tokens\n",
        stats.trace, stats.sessions, stats.requests, stats.sub_agent_requests, stats.sub_agents, stats.block_size
    );
    text += &match stats.starts_span_s {
        Some(span) => format!("sessions start as recorded, within {span:.1} s\n"),
        None => "no recorded starts\n".to_owned(),
    };
    text += &format!(
        "{} prompt tokens, {} output tokens\n\n{:<28}{:>10}{:>10}{:>10}{:>10}{:>10}\n",
        stats.prompt_tokens, stats.output_tokens, "", "mean", "p50", "p90", "p99", "max"
    );
    let rows = [
        ("turns a session", stats.turns_per_session),
        ("prompt (tokens)", stats.prompt_length),
        ("first prompt", stats.first_prompt_length),
        ("last prompt", stats.last_prompt_length),
        ("output", stats.output_length),
        ("new in a later turn", stats.tail.length),
        ("rewritten", stats.rewrites.length),
        ("boilerplate", stats.boilerplate_length),
        ("gap (s)", stats.gap_s),
    ];
    for (name, quantiles) in rows {
        text += &row(name, quantiles);
    }
    let percent = |share: f64| share * 100.0;
    text += &format!(
        "\n{:.1}% of later prompts repeats the turn before; a cache without limit hits {:.1}% of all prompt tokens\n",
        percent(stats.repeated_share),
        percent(stats.unlimited_cache_share)
    );
    text += &format!(
        "{:.1}% of later turns rewrite history; boilerplate is {:.1}% of first prompts\n",
        percent(stats.rewrites.share),
        percent(stats.boilerplate_share)
    );
    text
}

fn row(name: &str, quantiles: Option<Quantiles>) -> String {
    let Some(found) = quantiles else {
        return format!("{name:<28}{:>10}\n", "none");
    };
    let figures = [found.mean, found.p50, found.p90, found.p99, found.max];
    let cells: String = figures.iter().map(|figure| format!("{figure:>10.1}")).collect();
    format!("{name:<28}{cells}\n")
}
