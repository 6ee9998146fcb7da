"""How the page looks. Knows classes, sizes and colours, light and dark, and no value."""

from typing import Final

STYLE: Final = """
:root{color-scheme:light dark;--page:#f7f7f5;--card:#fff;--ink:#1b1e23;--dim:#5d6570;--rule:#e2e4e8;
--band:#f0f1f3;--before:#8b95a3;--after:#0d7a70;--budget:#b93a0b;--good:#0b7a43;
--keep:#9aa5b4;--recipes:#2f6fe4;--input:#d98a06;--segment:#8250df;--moved:#c0399b}
@media (prefers-color-scheme:dark){:root{--page:#121417;--card:#1a1d21;--ink:#e7e9ec;--dim:#9aa3ae;
--rule:#2d3239;--band:#22262b;--before:#7d8794;--after:#35cdbb;--budget:#ff9257;--good:#4ac585;
--keep:#5f6b7a;--recipes:#6ba1ff;--input:#f0b440;--segment:#b394f5;--moved:#f07fd0}}
*,::before{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,
"Segoe UI",Roboto,"Helvetica Neue",sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1080px;margin:0 auto;padding:32px 24px 48px}
h1{font-size:25px;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:17px;margin:0 0 4px}
p{margin:0}
.dim,.figure dd,figcaption,.foot{color:var(--dim)}
.verdict{margin:14px 0 20px;padding-left:12px;border-left:4px solid var(--good);font-size:17px;
overflow-wrap:anywhere;text-wrap:pretty}
.figures{display:grid;grid-template-columns:1.45fr 1fr 1fr 1.15fr;gap:12px;margin:0 0 12px}
.figure,section{background:var(--card);border:1px solid var(--rule);border-radius:10px}
.figure{padding:12px 16px;min-width:0}
.figure dt{font-size:13px;color:var(--dim)}
.figure dd{font-size:13px;margin:0;overflow-wrap:anywhere}
.figure strong{display:block;font-size:23px;line-height:1.35;font-weight:650;color:var(--ink)}
section{padding:18px 20px;margin:0 0 12px}
figure{margin:0}
figcaption{font-size:13px;margin:0 0 10px}
.key{display:flex;flex-wrap:wrap;gap:3px 16px;list-style:none;margin:8px 0 0;padding:0;
font-size:13px;color:var(--dim)}
.mark::before{content:"";display:inline-block;width:11px;height:11px;border-radius:3px;
margin-right:6px}
.mark.keep::before{background:var(--keep)}.mark.recipes::before{background:var(--recipes)}
.mark.input::before{background:var(--input)}.mark.segment::before{background:var(--segment)}
.mark.moved::before{background:var(--moved)}
.key .mark{padding-left:17px;text-indent:-17px}
.mark.point::before{border-radius:6px;border:2px solid var(--dim);background:var(--dim)}
.mark.chosen::before{border-color:var(--after);background:var(--after)}
.mark.measured::before{border-color:var(--ink);background:var(--card)}
.mark.before::before{border-color:var(--before);background:var(--before)}
.picture{display:block;width:100%;height:auto}
.picture.narrow{display:none;max-width:560px;margin:0 auto}
text{font-size:12px;fill:var(--dim)}
.grid{stroke:var(--rule);stroke-width:1;fill:none}
.band{fill:none}.band.even{fill:var(--band)}
.area{stroke:none;opacity:.16}.area.before{fill:var(--before)}.area.after{fill:var(--after)}
.line{fill:none;stroke-width:1.6;stroke-linejoin:round}
.line.before{stroke:var(--before)}.line.after{stroke:var(--after);stroke-width:2}
.line.budget{stroke:var(--budget);stroke-dasharray:6 4}
.choice.keep{fill:var(--keep)}.choice.recipes{fill:var(--recipes)}
.choice.input{fill:var(--input)}.choice.segment{fill:var(--segment)}.choice.moved{fill:var(--moved)}
.stage{font-size:11px}
.spot{fill:transparent}.spot:hover{fill:var(--ink);opacity:.08}
.unreachable{fill:var(--band)}
.label{font-weight:600;paint-order:stroke;stroke:var(--card);stroke-width:4px;
stroke-linejoin:round;fill:var(--ink);pointer-events:none}
.label.before{fill:var(--dim)}.label.after,.label.chosen{fill:var(--after)}
.label.budget{fill:var(--budget)}
.dot{fill:var(--dim);stroke:var(--card);stroke-width:2}
.dot.chosen{fill:var(--after)}.dot.measured{fill:var(--card);stroke:var(--ink)}
.dot.before{fill:var(--before)}
table{width:100%;table-layout:fixed;border-collapse:collapse;font-size:14px;margin-top:8px}
th,td{text-align:left;vertical-align:top;padding:7px 14px 7px 0;overflow-wrap:anywhere;
border-top:1px solid var(--rule)}
th{font-weight:600}
thead th{border:0;color:var(--dim);font-weight:500;font-size:13px;padding-bottom:4px}
tfoot th,tfoot td{border-top:2px solid var(--rule);font-weight:600}
.number{text-align:right;white-space:nowrap}
td small,th small{display:block;color:var(--dim);font-size:12.5px;font-weight:400}
.name{width:22%}.way{width:15%}.kept{width:22%}thead .number{width:9%}
.bar{display:block;width:100%;height:8px;margin:2px 0 3px}
.bar .all{fill:var(--rule)}.bar .some{fill:var(--after)}
.notes{margin:6px 0 0;padding-left:20px;overflow-wrap:anywhere}
.foot{font-size:13px;padding:6px 4px}
@media (max-width:900px){
.figures{grid-template-columns:1fr 1fr;gap:8px}
.figure{padding:10px 12px}.figure:first-child,.figure:last-child{grid-column:1/-1}
.figure strong{font-size:20px}
table,tbody,tfoot{display:block}
thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
tr{display:grid;grid-template-columns:1fr auto;gap:2px 12px;padding:10px 0;
border-top:1px solid var(--rule)}
th,td{border:0!important;padding:0}
.kept,.detail{grid-column:1/-1;width:auto}
.way{width:auto;text-align:right}
.number{text-align:left;font-size:13px}
.number::before{content:attr(data-name) " ";color:var(--dim);font-weight:400}
td:empty{display:none}}
@media (max-width:760px){
main{padding:20px 12px 32px}
h1{font-size:21px}.verdict{font-size:15.5px}
section{padding:14px 12px;border-radius:8px}
.picture.wide{display:none}.picture.narrow{display:block}}
@media print{body{background:#fff}section,.figure{break-inside:avoid}}
"""
