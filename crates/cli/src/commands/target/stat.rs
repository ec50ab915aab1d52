//! `rio target stat`

use std::{
    io::{ErrorKind, Read, Write},
    net::{TcpStream, ToSocketAddrs},
    thread,
    time::{Duration, Instant},
};

use riopipe_lab::{
    table::{Align, Table},
    terminal::{Colour, Terminal},
    units,
};
use riopipe_target::Stat;
use serde::Serialize;

use crate::{
    args::target::Stat as Args,
    failure::{Code, Failure},
    interrupt::Interrupt,
    output::{Output, Report},
    stage_table,
};

/// How long a target may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// More than this no target has to say.
const ANSWER_BYTES_MAX: u64 = 4 << 20;
/// How often it is looked whether to end.
const LOOK: Duration = Duration::from_millis(50);

pub(super) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    let address = address(&args.addr)?;
    let mut before = stat(address)?;
    output.result(&Figures { stat: before.clone(), address, is_interval: false })?;
    let Some(every) = args.watch else {
        return Ok(());
    };
    let interrupt = Interrupt::watch()?;
    loop {
        let due = Instant::now() + every;
        while Instant::now() < due {
            if interrupt.requested() {
                return Ok(());
            }
            thread::sleep(LOOK.min(due.saturating_duration_since(Instant::now())));
        }
        let now = stat(address)?;
        let since = Figures { stat: now.since(&before), address, is_interval: true };
        if !output.is_json() {
            output.raw(b"\n")?;
        }
        output.result(&since)?;
        before = now;
    }
}

/// `ADDR:PORT`, also as people copy it from a browser or a Prometheus configuration.
fn address(text: &str) -> Result<&str, Failure> {
    let text = text.strip_prefix("http://").unwrap_or(text);
    let text = text.split('/').next().unwrap_or_default();
    match text.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Ok(text),
        _ => Err(Failure::new(Code::Usage, format!("{text:?} is no address with a port"))
            .hint("give what the target was given, as in `rio target stat 127.0.0.1:9420`")),
    }
}

/// What the target there says about itself.
fn stat(address: &str) -> Result<Stat, Failure> {
    let body = fetch(address)?;
    let stat: Stat = serde_json::from_slice(&body)
        .map_err(|error| not_a_target(address, &format!("its answer makes no sense: {error}")))?;
    match stat.schema == Stat::SCHEMA {
        true => Ok(stat),
        false => Err(Failure::new(
            Code::Connection,
            format!("the target at {address} tells {:?}, not {:?}", stat.schema, Stat::SCHEMA),
        )
        .hint("it is of another version; use the `rio` that serves it")),
    }
}

const HINT: &str = "a target that was started with `rio target serve --metrics ADDR:PORT` tells, \
                    at that address; that of its drives is another";

fn not_a_target(address: &str, why: &str) -> Failure {
    Failure::new(Code::Connection, format!("{address} is not a Rio target's --metrics: {why}"))
        .hint(HINT)
}

/// The body of `/stat`.
fn fetch(address: &str) -> Result<Vec<u8>, Failure> {
    let failed = |error: &std::io::Error| match error.kind() {
        ErrorKind::ConnectionRefused => {
            Failure::new(Code::Connection, format!("nobody listens at {address}")).hint(HINT)
        }
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            not_a_target(address, &format!("no answer within {} s", PATIENCE.as_secs()))
        }
        ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::BrokenPipe => {
            not_a_target(address, "it hung up")
        }
        _ => Failure::new(Code::Connection, format!("can't ask {address}")).because(error),
    };
    let mut answer = Vec::new();
    let asked = (|| {
        let peer = address.to_socket_addrs()?.next().ok_or(ErrorKind::NotFound)?;
        let mut socket = TcpStream::connect_timeout(&peer, PATIENCE)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        let ask = format!("GET /stat HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        socket.write_all(ask.as_bytes())?;
        socket.take(ANSWER_BYTES_MAX).read_to_end(&mut answer)
    })();
    // Whoever doesn't speak HTTP may hang up on it in many ways; what it said first tells more.
    if let Err(error) = asked
        && answer.is_empty()
    {
        return Err(failed(&error));
    }
    let mut fields = [httparse::EMPTY_HEADER; 64];
    let mut response = httparse::Response::new(&mut fields);
    match response.parse(&answer) {
        Ok(httparse::Status::Complete(head)) => match response.code {
            Some(200) => Ok(answer.split_off(head)),
            code => Err(not_a_target(address, &format!("HTTP status {}", code.unwrap_or(0)))),
        },
        Ok(httparse::Status::Partial) => Err(not_a_target(address, "it hung up")),
        Err(_) => Err(not_a_target(address, "it doesn't speak HTTP")),
    }
}

#[derive(Debug, Serialize)]
struct Figures<'a> {
    #[serde(flatten)]
    stat: Stat,
    /// Where it was asked.
    address: &'a str,
    /// Whether counters and stages are those since the last look, `uptime_s` ago, not since the
    /// start.
    is_interval: bool,
}

impl Report for Figures<'_> {
    fn text(&self, terminal: &Terminal) -> String {
        let Self { stat, .. } = self;
        let span = units::time(stat.uptime_s * 1e9);
        let head = match self.is_interval {
            true => format!("{}: the last {span}", stat.subnqn),
            false => format!("{} {}: serving for {span}", stat.subnqn, stat.version),
        };
        let mut text = format!(
            "{}, reactors: {}, queues connected: {}\n\n",
            terminal.paint(Colour::Bold, &head),
            stat.reactors,
            stat.connections
        );
        let mut table =
            Table::new(&[("count of", Align::Left), ("", Align::Right), ("per s", Align::Right)]);
        for (name, count) in stat.counters.iter().filter(|(_, count)| **count > 0) {
            let rate = *count as f64 / stat.uptime_s.max(1e-9);
            table.row([name.replace('_', " "), count.to_string(), units::count(rate)]);
        }
        if stat.counters.values().any(|count| *count > 0) {
            text += &table.render(terminal);
            text.push('\n');
        }
        match stat.stages.iter().any(|stage| stage.count > 0) {
            true => text += &stage_table::render(&stat.stages, terminal),
            false => {
                text +=
                    &format!("No ordered write was traced: one in {} is.\n", stat.sampled_one_in);
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_as_people_write_them() {
        for text in ["127.0.0.1:9420", "http://127.0.0.1:9420/metrics", "http://127.0.0.1:9420"] {
            assert_eq!(address(text), Ok("127.0.0.1:9420"));
        }
        assert_eq!(address("[::1]:9420"), Ok("[::1]:9420"));
        for wrong in ["", "127.0.0.1", ":9420", "localhost:", "localhost:port", "9420"] {
            assert_eq!(address(wrong).unwrap_err().code, Code::Usage, "{wrong}");
        }
    }
}
