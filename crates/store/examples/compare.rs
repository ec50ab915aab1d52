//! Measures a store on engines `rio`, `horae` and `linux`: transactions per second that are applied
//! (durable) and queued (ordered), of short and of long content.
//!
//! ```text
//! compare [SECONDS [DRIVE]]
//! ```
//!
//! Each engine has a target in this process, on loopback, with a drive of its own. The engines run
//! in turns, several rounds each, and the median round counts. The table also has the ratio of each
//! median to that of `linux`. The usual drive is a modelled SSD with a volatile cache
//! (`ssd:flash,size=256M`). A queued run counts only what is durable at its end: its time includes
//! the wait for the last transaction.

use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use riopipe::{CreateOptions, EngineKind, MemberAddr, OpenOptions, Volume};
use riopipe_store::{Store, StoreOptions, StorePlace, Transaction};
use riopipe_target::{Config, Running, Target};
use tempfile::TempDir;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const ENGINES: [EngineKind; 3] = [EngineKind::Rio, EngineKind::Horae, EngineKind::Linux];
const ROUNDS: usize = 3;
const THREADS: usize = 4;
/// Bytes of the content of a transaction: in the record, and in blocks of its own.
const SIZES: [usize; 2] = [1 << 10, 64 << 10];

/// An open store, and all that it needs. Fields are dropped in this order.
struct Contender {
    engine: EngineKind,
    store: Store,
    _volume: Volume,
    _target: Running,
    _dir: TempDir,
}

impl Contender {
    fn start(engine: EngineKind, drive: &str) -> Result<Self> {
        let dir = TempDir::new()?;
        let mut config = Config::on_loopback(&[drive]);
        config.subnqn = Some(format!("nqn.2026-01.org.example:store-{engine}"));
        config.log = Some(format!("file:{}/log,size=2M", dir.path().display()));
        let target = Target::start(&config)?;
        let member: MemberAddr = format!("{},ns=1", target.addresses()[0]).parse()?;
        let engine_option = Some(engine);
        let options =
            CreateOptions { streams: 2, engine: engine_option, ..CreateOptions::default() };
        let members = [member];
        Volume::create("compare", &members, &options)?;
        let (volume, _) = Volume::open("compare", &members, &OpenOptions::default())?;
        let log_blocks = volume.blocks() / 4;
        let place = StorePlace {
            log_stream: 0,
            log_lba: 0,
            log_blocks,
            data_stream: 1,
            data_lba: log_blocks,
            data_blocks: volume.blocks() - log_blocks,
        };
        let store = Store::create(&volume, place, &StoreOptions::default())?;
        Ok(Self { engine, store, _volume: volume, _target: target, _dir: dir })
    }

    /// Transactions per second of several threads. Each puts its own objects again and again.
    fn run(&self, size: usize, applies: bool, time: Duration) -> Result<f64> {
        let done = AtomicUsize::new(0);
        let begin = Instant::now();
        let store = &self.store;
        std::thread::scope(|scope| -> Result<()> {
            let threads: Vec<_> = (0..THREADS)
                .map(|thread| {
                    let done = &done;
                    scope.spawn(move || -> Result<()> {
                        let content = vec![thread as u8; size];
                        let mut last = None;
                        while begin.elapsed() < time {
                            let number = done.fetch_add(1, Ordering::Relaxed) % 64;
                            let name = format!("{thread}-{number}");
                            let transaction = Transaction::new().put(&name, &content);
                            if applies {
                                store.apply_transaction(transaction, None)?;
                            } else {
                                last = Some(store.queue_transaction(transaction)?);
                            }
                        }
                        last.map_or(Ok(()), |ticket| Ok(ticket.wait(None)?))
                    })
                })
                .collect();
            for thread in threads {
                thread.join().map_err(|_| "a thread has panicked")??;
            }
            Ok(())
        })?;
        Ok(done.load(Ordering::Relaxed) as f64 / begin.elapsed().as_secs_f64())
    }
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let seconds: f64 = args.next().map_or(Ok(1.0), |seconds| seconds.parse())?;
    let drive = args.next().unwrap_or_else(|| "ssd:flash,size=256M".into());
    let time = Duration::try_from_secs_f64(seconds)?;
    let contenders = ENGINES.into_iter().map(|engine| Contender::start(engine, &drive));
    let contenders = contenders.collect::<Result<Vec<_>>>()?;
    println!("{THREADS} threads, {ROUNDS} rounds of {time:?} in turns, drive {drive}\n");
    println!("{:<22}{:>10}{:>14}{:>12}", "", "engine", "per second", "to linux");
    for applies in [true, false] {
        for size in SIZES {
            let mut rates = vec![Vec::new(); contenders.len()];
            for _ in 0..ROUNDS {
                for (contender, rates) in contenders.iter().zip(&mut rates) {
                    rates.push(contender.run(size, applies, time)?);
                }
            }
            let medians: Vec<f64> = rates.into_iter().map(median).collect();
            let linux = contenders.iter().position(|one| one.engine == EngineKind::Linux);
            let linux = linux.map_or(f64::NAN, |linux| medians[linux]);
            let kind = if applies { "apply" } else { "queue" };
            for (contender, rate) in contenders.iter().zip(&medians) {
                let what = format!("{kind}, {} KiB", size >> 10);
                let engine = contender.engine.to_string();
                println!("{what:<22}{engine:>10}{rate:>14.0}{:>12.2}", rate / linux);
            }
        }
    }
    for contender in contenders {
        contender.store.close(None)?;
    }
    Ok(())
}
